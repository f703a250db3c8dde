"""The machine that a bench runs on: what it is, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path

import numpy as np

from stem_edge.runtime.machine import available_memory

CPU_INFO = Path("/proc/cpuinfo")
INTEGER_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
BANDWIDTH_NBYTES = 1 << 29  # of each thread: far more than a cache holds
BANDWIDTH_SHARE = 0.25  # of the memory that is left, for all threads


def machine() -> str:
    """Processor and memory in words, as far as the system tells."""
    import psutil

    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    known = {name.strip(): value.strip() for name, value in fields.items()}
    name = known.get("model name") or platform.processor() or platform.machine()
    flags = known.get("flags", "").split()
    extras = ", ".join(extra for extra in INTEGER_PRODUCTS if extra in flags) or "no VNNI"
    memory = psutil.virtual_memory().total / 1e9
    return f"{os.cpu_count()} x {name}{f' ({extras})' if flags else ''}, {memory:.0f} GB"


def bandwidth(threads: int) -> float:
    """Bytes a second that all threads together read from memory."""
    left = int(BANDWIDTH_SHARE * available_memory())
    nbytes = min(BANDWIDTH_NBYTES, left // threads) // 8 * 8
    arrays = [np.ones(nbytes // 8, np.uint64) for _ in range(threads)]
    rates = []
    for _ in range(3):
        readers = [threading.Thread(target=np.bitwise_or.reduce, args=(a,)) for a in arrays]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        rates.append(threads * nbytes / (time.perf_counter() - started))
    return max(rates)
