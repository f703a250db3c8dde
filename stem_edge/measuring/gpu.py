"""Memory that a process holds on a GPU, as its driver says."""

from __future__ import annotations

import shutil
import subprocess

from stem_edge.runtime.options import LoadKeywords, Providers

QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
SECONDS = 10.0


def device_nbytes(pid: int, providers: Providers) -> int | None:
    """Bytes on NVIDIA GPUs; 0 if none is used, None where nobody tells. providers: as of load."""
    if providers is None:
        return 0
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        pairs = [line.split(",") for line in done.stdout.splitlines() if "," in line]
        held = [int(used) << 20 for owner, used in pairs if int(owner) == pid]
        # The driver lists what computes by CUDA, by the ids outside of a container.
        return sum(held) if held else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def on_cpu(options: LoadKeywords) -> bool:
    """Whether onnxruntime runs the backbone on the CPU as usual, for which it can be prepared.

    Raises InputError, BackendError for providers that cannot be used.
    """
    wanted = options.get("providers")
    if options.get("device_memory") is not None:
        return False  # a part of its memory plays the device
    if wanted is None:
        return True
    from stem_edge.runtime.providers import resolve

    return resolve(wanted, options.get("provider_libraries"))[0].on_cpu
