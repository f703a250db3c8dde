"""Memory that a process holds on a GPU, as its driver says."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

CPU = "CPUExecutionProvider"  # onnxruntime's name of it
QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
SECONDS = 10.0


def device_nbytes(pid: int, providers: Sequence[str] | None) -> int | None:
    """Bytes on NVIDIA GPUs; 0 on the CPU alone, None where nobody tells."""
    if not providers or list(providers) == [CPU]:
        return 0
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        pairs = [line.split(",") for line in done.stdout.splitlines() if "," in line]
        return sum(int(used) << 20 for owner, used in pairs if int(owner) == pid)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
