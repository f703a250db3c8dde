"""Measures a process's memory by kind: anonymous, shared, or mapped files.

Too much anonymous memory gets a process killed; pages of files are taken back by the system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")
SHARED_NAMES = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "[anon_shmem:")


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process by kind, and its bytes in swap; None if unknown.

    Outside Linux, `anonymous` is USS, the memory that would be free if the process ended, or all resident
    memory if psutil may not read USS; `other_files` is the rest.
    """

    anonymous: int  # not from files: Python's objects, the engine's buffers, KV cache, row cache
    swap: int | None = None
    backbone: int | None = None  # pages mapped from its files, as exported or prepared
    libraries: int | None = None  # pages mapped from code
    other_files: int | None = None
    shared: int | None = None  # shared with other processes, but not a file on disk

    @property
    def unevictable(self) -> int:
        """Bytes of anonymous memory and swap. `memory=` of stem_edge.load limits them."""
        return self.anonymous + (self.swap or 0)


class MemoryReader:
    """Reads the memory of one process. Methods raise OSError when the process has ended.

    backbone: files and folders whose mapped pages count as Memory.backbone.
    """

    def __init__(self, pid: int, backbone: Sequence[Path] = ()) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._backbone = [shown for path in backbone for shown in _as_shown(path)]
        with _psutil_errors():
            self._process: Any = psutil.Process(pid)  # Any, because systems differ in its methods

    def memory(self) -> Memory:
        """Return the process's memory by kind. Takes milliseconds, more if gigabytes are mapped."""
        with _psutil_errors():
            # Linux kernels can be built without smaps.
            if psutil.LINUX and hasattr(self._process, "memory_maps"):
                return self._of_mappings()
            resident = alone = self._process.memory_info().rss
            with suppress(psutil.AccessDenied):
                alone = getattr(self._process.memory_full_info(), "uss", resident)
        return Memory(alone, other_files=max(0, resident - alone))

    def _of_mappings(self) -> Memory:
        sums = dict.fromkeys((field.name for field in fields(Memory)), 0)
        for one in self._process.memory_maps(grouped=False):
            kind = self._kind(one.path)
            # Pages that were written to through a private mapping are copies: the system cannot read
            # them from the file again.
            copies = 0 if kind == "shared" else one.anonymous
            sums[kind] += one.rss - copies
            sums["anonymous"] += copies
            if "s" not in one.perms:  # as in VmSwap, which unevictable() reads
                sums["swap"] += one.swap
        return Memory(**sums)

    def _kind(self, path: str) -> str:
        if path.startswith(SHARED_NAMES):
            return "shared"
        if not path.startswith("/"):
            return "anonymous"
        if any(path == place or path.startswith(place + "/") for place in self._backbone):
            return "backbone"
        in_bin = path.rsplit("/", 2)[-2:-1] == ["bin"]
        return "libraries" if in_bin or LIBRARY.search(path) else "other_files"

    def unevictable(self) -> int:
        """Return the process's bytes of anonymous memory and swap. On Linux, this is fast."""
        if not psutil.LINUX:
            return self.memory().unevictable
        # Not strictly ASCII, because a program may choose any bytes as its name.
        lines = self._status.read_text("ascii", "replace").splitlines()
        found = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        if "VmRSS" not in found:  # ended, but its parent has not waited for it yet
            raise ProcessLookupError("the process has ended")
        if "RssAnon" not in found:  # some sandboxes imitate /proc without this line
            return self.memory().unevictable
        return sum(int(found[name][0]) << 10 for name in ("RssAnon", "VmSwap") if name in found)


@contextmanager
def _psutil_errors() -> Iterator[None]:
    """Convert errors of psutil in the `with` block to OSError."""
    try:
        yield
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from error


def _as_shown(folder: Path) -> list[str]:
    """Return the paths of a folder and of the targets of its links, as /proc spells them.

    /proc escapes only newlines. In a Hugging Face cache, all files are links.
    """
    links = (path for path in folder.rglob("*") if path.is_symlink())
    return [str(path.resolve()).replace("\n", "\\012") for path in (folder, *links)]
