"""What NVIDIA's driver tells."""

from __future__ import annotations

import shutil
import subprocess

SMI_SECONDS = 10.0
NAME_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
MEMORY_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


def free_on_nvidia(device: str) -> int | None:
    """Free bytes of the NVIDIA GPU of this number; None if the driver does not tell."""
    query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits", f"--id={device}")
    free = "".join(ask_nvidia(*query)[:1]).strip()
    return int(free) << 20 if free.isdigit() else None


def about_nvidia(device_id: str) -> dict[str, str]:
    """Return name and driver of an NVIDIA GPU, or nothing if nvidia-smi gives no answer."""
    name, _, driver = "".join(ask_nvidia(*NAME_QUERY, f"--id={device_id}")[:1]).rpartition(",")
    return {"device": name.strip(), "driver": driver.strip()} if name else {}


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
