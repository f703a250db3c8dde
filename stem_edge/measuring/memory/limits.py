"""Runs a process inside the limits of a device, where this machine allows, and says which are real.

Memory: a cgroup of its own, version 1 or 2, which takes rights that root and some user sessions have.
CPUs: affinity. Flash: delays (stem_edge.runtime.rows.flash), always emulated. The speed of a core and of
memory cannot be limited, so times on a faster machine are not those of the device.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stem_edge.measuring.memory.devices import Device
from stem_edge.system.memory import memory_cgroup, usable_cpus
from stem_edge.units import format_size

How = Literal["real", "emulated", "not applied"]
PREFIX = "stem-edge-"
# Version of cgroups -> limits of memory; of memory and swap together, or of swap.
LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.swap.max"),
}
REMOVE_TRIES = 50  # a cgroup is busy for a moment after its last process has ended


@dataclass(frozen=True)
class Limit:
    """One limit, and whether it holds."""

    what: str
    how: How
    words: str


class Limits(contextlib.ExitStack):
    """A context manager around a process that `confine` is called with, before it works."""

    def __init__(self, device: Device | None, flash: str | None = None) -> None:
        """`flash`: what reads are delayed as; None: nothing is read, or not delayed."""
        super().__init__()
        self.device, self.flash = device, flash
        self.limits: list[Limit] = []

    @property
    def cpus(self) -> int | None:
        """CPUs that the process gets; None: all it may use."""
        return None if self.device is None else min(self.device.cpus, usable_cpus())

    def confine(self, pid: int) -> None:
        """Apply what can be applied to a process that has not begun to work."""
        if self.device is None:
            return
        flash = Limit("flash", "not applied", "this run reads no rows from flash")
        if self.flash is not None:
            flash = Limit("flash", "emulated", f"reads delayed as {self.flash} would delay them")
        self.limits = [
            self._limit_memory(pid, self.device),
            self._limit_cpus(pid, self.device),
            flash,
            Limit("speed", "not applied", "cores and memory are as fast as this machine's"),
        ]

    def _limit_memory(self, pid: int, device: Device) -> Limit:
        size = format_size(device.memory)
        found = memory_cgroup()
        parent = None if found is None else _parent(*found)
        if found is None or parent is None:
            return Limit("memory", "emulated", f"{size}, but no cgroup enforces it here")
        folder, version = parent / f"{PREFIX}{os.getpid()}-{pid}", found[1]
        _sweep(parent)
        self.callback(_remove, folder)  # first, so that an interrupt leaves nothing behind
        try:
            folder.mkdir(exist_ok=True)  # one of a process that was killed and had the same number
            limit, with_swap = LIMIT_FILES[version]
            _write(folder / limit, device.memory)
            with contextlib.suppress(OSError):  # only where swap is accounted
                _write(folder / with_swap, device.memory if version == 1 else 0)
            _write(folder / "cgroup.procs", pid)
        except OSError as error:
            _remove(folder)
            why = f"{size}, not enforced: no cgroup in {parent} ({error.strerror})"
            return Limit("memory", "emulated", why)
        words = f"{size} for the process and the files it reads, by a cgroup of version {version}"
        return Limit("memory", "real", words)

    def _limit_cpus(self, pid: int, device: Device) -> Limit:
        count, wanted = self.cpus or 1, device.cpus
        if not hasattr(os, "sched_setaffinity"):
            return Limit("cpus", "emulated", f"{count} threads; this system binds no process")
        try:
            os.sched_setaffinity(pid, sorted(os.sched_getaffinity(0))[:count])
        except OSError as error:
            return Limit("cpus", "emulated", f"{count} threads, not bound ({error.strerror})")
        words = f"{count} by affinity" if count == wanted else f"{count}, this machine has no more"
        return Limit("cpus", "real", f"{words}; the device has {wanted}")


def _sweep(parent: Path) -> None:
    """Remove what runs that were killed have left."""
    import psutil

    for folder in parent.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    for _ in range(REMOVE_TRIES):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)


def _parent(own: Path, version: int) -> Path | None:
    """Where a cgroup with a limit can be made. In version 2, only groups without processes of their
    own hand memory to their children, so it is a group above, where the new one is a neighbour."""
    if version == 1:
        return own
    for folder in (own, *own.parents):
        try:
            if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                return folder
        except OSError:  # above the top
            return None
    return None


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))
