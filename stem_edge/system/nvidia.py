"""What NVIDIA's driver tells."""

from __future__ import annotations

import shutil
import subprocess

SMI_SECONDS = 10.0
MEMORY_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


def nbytes_on_nvidia(pid: int) -> int | None:
    """Return the bytes that a process holds on NVIDIA GPUs; None if the driver does not list it.

    The driver lists processes that use CUDA, by the ids that they have outside of any container.
    """
    pairs = [line.partition(", ")[::2] for line in ask_nvidia(*MEMORY_QUERY)]
    held = [int(used) << 20 for owner, used in pairs if owner == str(pid) and used.isdigit()]
    return sum(held) if held else None


def ask_nvidia(*query: str) -> list[str]:
    """Query nvidia-smi and return its lines; empty if there is no driver, or it fails."""
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
