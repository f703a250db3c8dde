"""Measures free memory of the machine and memory of this process, and controls its allocations.

"Memory" means anonymous memory, in RAM or swapped out, because too much of it gets a process
killed. Pages of files are counted separately, because the system reclaims them when it needs to.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from stem_edge.errors import OutOfMemoryError, StemEdgeError

Scalar = TypeVar("Scalar", bound=np.generic)
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Version 1 of cgroups says "no limit" with a number near 2**63.
UNLIMITED = 1 << 60
# Parameters of glibc's mallopt, and their initial value.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEPT_NBYTES = -1, -3, 1 << 17
# About what Python with numpy and onnxruntime uses; assumed if the system does not report it.
TYPICAL_PROCESS_NBYTES = 64 << 20


def available_memory() -> int:
    """Return free memory in bytes: of the machine, or less if a cgroup limits this process."""
    groups = _limited_groups()
    return min([_of_machine("MemAvailable", "available"), *(left for _, left in groups)])


def memory_limit() -> int:
    """Return the bytes of RAM, or of the process's smallest cgroup memory limit if it is less."""
    groups = _limited_groups()
    return min([_of_machine("MemTotal", "total"), *(limit for limit, _ in groups)])


def _of_machine(field: str, name: str) -> int:
    """Return bytes: `field` of Linux's /proc/meminfo, or psutil's value `name` on other systems."""
    for line in _lines(PROC / "meminfo"):
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    import psutil  # 10 ms

    return int(getattr(psutil.virtual_memory(), name))


def own_memory() -> int:
    """Return the bytes of anonymous memory and swap that this process uses."""
    try:
        status = (PROC / "self" / "status").read_text()
    except OSError:
        return TYPICAL_PROCESS_NBYTES
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    kilobytes = [int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "VmSwap")]
    return sum(kilobytes) << 10


def usable_cpus() -> int:
    """Return the number of CPUs that affinity and cgroup quotas let this process use."""
    known = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    groups, version = memory_groups()
    for group in groups if version == 2 else ():
        for quota, period in (line.split() for line in _lines(group / "cpu.max")):
            count = min(count, count if quota == "max" else -(-int(quota) // int(period)))
    return count


def check_threads(threads: int | None, error: type[StemEdgeError]) -> None:
    """Raise `error` if the number of threads is below 1 or far above the number of CPUs."""
    cpus = usable_cpus()
    most = max(8, 4 * cpus)  # on 2 CPUs, 8 threads answered in 8 seconds, and 16 not in 40
    if threads is not None and not 1 <= threads <= most:
        raise error(
            f"threads is {threads}; expected 1 to {most}, because this process may use {cpus} CPUs; leave it "
            "out for one thread for each CPU"
        )


def return_freed_memory() -> None:
    """Return freed memory to the system. Memory that glibc keeps would count as used."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)


def give_back_freed_blocks(nbytes: int = KEPT_NBYTES) -> None:
    """Make glibc return freed blocks of `nbytes` or more to the system at once, from now on.

    By default, glibc keeps 14 to 22 MB of freed blocks after a prompt.
    """
    if sys.platform == "linux" and (tune := getattr(ctypes.CDLL(None), "mallopt", None)):
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            tune(threshold, nbytes)


def own_pages(shape: tuple[int, ...], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Return zeros in pages of their own, allocated when written and freed with the array.

    Raises MemoryError.
    """
    count, private = int(np.prod(shape)), dict[str, int]()
    if hasattr(mmap, "MAP_ANONYMOUS"):  # because shared memory does not count as anonymous
        private["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    nbytes = max(1, count * np.dtype(dtype).itemsize)  # an empty map cannot be made
    try:
        memory = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # otherwise a few bytes may take 2 MiB
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def free_pages(array: npt.NDArray[Any]) -> None:
    """Give the whole pages of an array from `own_pages` back to the system; their values are lost."""
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE
    if sys.platform == "linux" and pages > 0:  # other systems would keep the pages
        nbytes = ctypes.c_size_t(pages * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), nbytes, mmap.MADV_DONTNEED)


def raise_out_of_memory(error: MemoryError, doing: str, advice: str) -> NoReturn:
    """Raise an OutOfMemoryError that says what the memory was for and what the user can do."""
    if isinstance(error, OutOfMemoryError):
        try:
            raise error
        finally:
            del error  # breaks a reference cycle that would keep this frame's memory
    found = " ".join(str(error).split())
    details = f" ({found})" if found else ""
    raise OutOfMemoryError(f"no memory left {doing}{details}; {advice}") from error


def memory_groups() -> tuple[list[Path], int]:
    """Return the folders of this process's memory cgroup and its parents, and its version, 1 or 2."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        top = CGROUPS / "memory" if version == 1 else CGROUPS
        folder = top / path.lstrip("/")
        # In a container the path may name a folder that is not mounted; use the top instead.
        found = folder if folder.is_dir() else top
        if (found / "memory.stat").is_file():
            return [
                group for group in (found, *found.parents) if group.is_relative_to(top)
            ], version
    return [], 2


def _limited_groups() -> list[tuple[int, int]]:
    """Return (limit, bytes left) of each of this process's cgroups that has a memory limit."""
    groups, version = memory_groups()
    found, prefix, names = list[tuple[int, int]](), "", ("memory.max", "memory.current")
    if version == 1:
        prefix, names = "total_", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for group in groups:
        limit, used = (_number(group / name) for name in names)
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        # Pages of files count as used, but the system drops or writes them before it refuses memory. That
        # is true for active pages (read twice) and for pages that are not written yet, too.
        stats = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
        files = sum(int(stats.get(f"{prefix}{kind}_file", "0")) for kind in ("inactive", "active"))
        found.append((limit, max(0, limit - used + files)))
    return found


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
