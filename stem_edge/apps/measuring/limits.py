"""A limit on the memory of a process and of the files that it reads: a cgroup of its own (Linux)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stem_edge.errors import InputError
from stem_edge.shown import format_size
from stem_edge.system.memory import memory_cgroup

# Version of cgroups -> files that limit memory, and memory with swap (version 1) or swap alone (2).
LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.swap.max"),
}
REMOVE_TRIES = 50  # because a cgroup stays busy for a moment after its last process has ended


@contextlib.contextmanager
def limited(nbytes: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that puts a process, by its id, under a limit; None: it does nothing.

    The process must have ended when the body does. Raises InputError where no cgroup can be made.
    """
    if nbytes is None:
        yield lambda pid: None
        return
    found = memory_cgroup()
    parent = None if found is None else _parent(*found)
    if found is None or parent is None:
        raise _refused(nbytes, "no cgroup enforces it here")
    folder = parent / f"stem-edge-{os.getpid()}"

    def confine(pid: int) -> None:
        try:
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise _refused(nbytes, f"{folder} takes no process ({error.strerror})") from error

    try:
        _make(folder, nbytes, found[1])
        yield confine
    finally:
        _remove(folder)


def _make(folder: Path, nbytes: int, version: int) -> None:
    limit, with_swap = LIMIT_FILES[version]
    try:
        # It may exist, because a killed process with the same id could not remove its own.
        folder.mkdir(exist_ok=True)
        (folder / limit).write_text(str(nbytes))
    except OSError as error:
        raise _refused(nbytes, f"no cgroup in {folder.parent} ({error.strerror})") from error
    with contextlib.suppress(OSError):  # kernels that do not account swap cannot limit it
        (folder / with_swap).write_text(str(nbytes if version == 1 else 0))


def _refused(nbytes: int, why: str) -> InputError:
    return InputError(
        f"limit is {format_size(nbytes)}, but {why}; on Linux, root may make cgroups, and so may what "
        "systemd-run --user --scope starts"
    )


def _remove(folder: Path) -> None:
    for _ in range(REMOVE_TRIES):
        try:
            folder.rmdir()  # twice, because it is known to be gone by its absence
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
