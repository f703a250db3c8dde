"""Limits of a device around a process, as far as this machine can enforce them.

Memory: a cgroup of its own, version 1 or 2; root and some user sessions may make one.
CPUs: affinity. Flash: delays (stem_edge.runtime.rows.emulated_flash), always emulated. The speed of cores and
of memory cannot be limited, so times on a faster machine are not those of the device.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stem_edge.errors import InputError
from stem_edge.measuring.memory.device_profiles import Device
from stem_edge.shown import format_size
from stem_edge.system.memory import memory_cgroup, usable_cpus

PREFIX = "stem-edge-"
# Version of cgroups -> files that limit memory, and memory with swap (version 1) or swap alone (2).
LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.swap.max"),
}
REMOVE_TRIES = 50  # because a cgroup stays busy for a moment after its last process has ended


@dataclass(frozen=True)
class Limit:
    """A limit of the device, and if it is enforced here."""

    what: str
    how: Literal["real", "emulated", "not applied"]
    words: str


class ProcessLimits(contextlib.ExitStack):
    """Context manager around a process: call `confine` with its pid before it starts to work."""

    def __init__(
        self, device: Device | None, flash: str | None = None, memory: int | None = None
    ) -> None:
        """`flash`: the profile that delays reads; None if nothing is read, or not delayed.

        `memory`: a limit in bytes that must be real, instead of the device's.
        """
        super().__init__()
        self.device, self.flash, self.memory = device, flash, memory
        self.limits: list[Limit] = []

    def confine(self, pid: int) -> None:
        """Apply all limits that this machine can enforce to a new process. Raises InputError."""
        if self.memory is not None:
            self.limits = [self.confine_memory(pid, self.memory)]
            if self.limits[0].how != "real":
                raise InputError(
                    f"limit is {self.limits[0].words}; on Linux, root may make cgroups, and so may "
                    "what systemd-run --user --scope starts"
                )
        if self.device is None:
            return
        flash = Limit("flash", "not applied", "this run reads no rows from flash")
        if self.flash is not None:
            flash = Limit("flash", "emulated", f"reads delayed as {self.flash} would delay them")
        memory = [self.confine_memory(pid, self.device.memory)] if self.memory is None else []
        self.limits = [
            *(memory or self.limits),
            self._limit_cpus(pid, self.device),
            flash,
            Limit("speed", "not applied", "cores and memory are as fast as this machine's"),
        ]

    def confine_memory(self, pid: int, nbytes: int) -> Limit:
        """Move a process into a cgroup of its own, and say if that can be done here."""
        size = format_size(nbytes)
        found = memory_cgroup()
        parent = None if found is None else _parent(*found)
        if found is None or parent is None:
            return Limit("memory", "emulated", f"{size}, but no cgroup enforces it here")
        folder, version = parent / f"{PREFIX}{os.getpid()}-{pid}", found[1]
        self.callback(_remove, folder)  # first, so that an interrupt leaves nothing behind
        try:
            # It may exist, because a killed process with the same pid could not remove its own.
            folder.mkdir(exist_ok=True)
            limit, with_swap = LIMIT_FILES[version]
            (folder / limit).write_text(str(nbytes))
            with contextlib.suppress(OSError):  # kernels that do not account swap cannot limit it
                (folder / with_swap).write_text(str(nbytes if version == 1 else 0))
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            _remove(folder)
            why = f"{size}, not enforced: no cgroup in {parent} ({error.strerror})"
            return Limit("memory", "emulated", why)
        words = f"{size} for the process and the files it reads, by a cgroup of version {version}"
        return Limit("memory", "real", words)

    def _limit_cpus(self, pid: int, device: Device) -> Limit:
        count, wanted = min(device.cpus, usable_cpus()), device.cpus
        if not hasattr(os, "sched_setaffinity"):
            return Limit("cpus", "emulated", f"{count} threads; this system binds no process")
        try:
            os.sched_setaffinity(pid, sorted(os.sched_getaffinity(0))[:count])
        except OSError as error:
            return Limit("cpus", "emulated", f"{count} threads, not bound ({error.strerror})")
        words = f"{count} by affinity" if count == wanted else f"{count}, this machine has no more"
        return Limit("cpus", "real", f"{words}; the device has {wanted}")


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
    """Return the cgroup in which one with a limit can be made, or None."""
    # In version 2, a group with processes of its own cannot limit its children's memory, so take
    # one above it, in which the new group will be a sibling of ours.
    if version == 1:
        return own
    for folder in (own, *own.parents):
        try:
            if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                return folder
        except OSError:  # above the root of the hierarchy
            return None
    return None
