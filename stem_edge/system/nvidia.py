"""What NVIDIA's driver tells."""

from __future__ import annotations

import shutil
import subprocess

SMI_SECONDS = 10.0


def free_on_nvidia(device: str) -> int | None:
    """Free bytes of the NVIDIA GPU of this number; None if the driver does not tell."""
    query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits", f"--id={device}")
    free = "".join(ask_nvidia(*query)[:1]).strip()
    return int(free) << 20 if free.isdigit() else None


def ask_nvidia(*query: str) -> list[str]:
    """Query nvidia-smi and return its lines; none if there is no driver, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
