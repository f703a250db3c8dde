"""Memory of a process by kind, and what each kind means on this system.

"Uses 5 GB" says little, because the kinds behave differently: too much anonymous memory gets a
process killed, while the system takes back pages of files whenever it likes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import psutil

PROC = Path("/proc")
ENDED = "the process has ended"
STATUS = ("VmRSS", "VmSwap", "RssAnon")  # lines of /proc/PID/status
LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")
DELETED = " (deleted)"  # Linux appends this to the name of a mapped file that is gone
SHARED_NAMES = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "[anon_shmem:")
FileKind = Literal["backbone", "tables", "libraries", "other_files"]

DEFINITIONS = {
    "anonymous": "memory that belongs to no file: Python's objects, the engine's buffers, the KV "
    "cache, the row cache. Only swap can take it; too much of it gets a process killed",
    "swap": "anonymous memory that was moved to swap",
    "backbone": "pages mapped from the backbone's files, as exported or prepared; the system drops "
    "them when it needs memory and reads them again",
    "tables": "pages mapped from the table store; none unless reads is mmap, because pread copies",
    "libraries": "pages mapped from the code of Python, the engine and other libraries",
    "other_files": "pages mapped from any other file",
    "shared": "memory that may be shared with other processes and belongs to no file on disk",
}
# Systems other than Linux tell less: psutil's figures go under the nearest of these names.
PORTABLE_DEFINITIONS = {
    "anonymous": "USS of psutil: memory that no other process uses and that would be free if this "
    "one ended, with pages of files that only it has mapped; all resident memory where psutil may "
    "not ask, as on macOS without rights",
    "other_files": "resident memory that is not in USS: pages shared with other processes",
}


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process by kind, and bytes in swap; None if the system does not tell."""

    anonymous: int
    swap: int | None = None
    backbone: int | None = None
    tables: int | None = None
    libraries: int | None = None
    other_files: int | None = None
    shared: int | None = None

    @property
    def resident(self) -> int:
        """Bytes in memory: the sum of all kinds except swap."""
        return sum(self.kinds().values()) - (self.swap or 0)

    @property
    def unevictable(self) -> int:
        """Anonymous memory and swap, which `memory=` of stem_edge.load limits."""
        return self.anonymous + (self.swap or 0)

    def kinds(self) -> dict[str, int]:
        """Return kind -> bytes, for the kinds that are known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Totals:
    """Sums that are cheap enough to read many times a second."""

    unevictable: int  # anonymous memory and swap
    resident: int


class FileKinds:
    """Kinds of mapped files, by their paths."""

    def __init__(self, tables: Path, backbone: tuple[Path, ...]) -> None:
        self._tables = _as_shown(tables)
        self._backbone = [shown for path in backbone for shown in _as_shown(path)]

    def kind(self, path: str) -> FileKind:
        """Return the kind of a mapped file."""
        if any(
            _inside(path, shown) for shown in self._tables
        ):  # first, because the tables lie in the bundle's folder, too
            return "tables"
        if any(_inside(path, shown) for shown in self._backbone):
            return "backbone"
        name = path.rsplit("/", 1)[-1]
        in_bin = path.rsplit("/", 2)[-2:-1] == ["bin"]
        return "libraries" if in_bin or LIBRARY.search(name) else "other_files"


class MemoryReader:
    """Reads the memory of one process through psutil, on macOS, Windows and elsewhere.

    Methods raise OSError when the process has ended.
    """

    definitions: Mapping[str, str] = PORTABLE_DEFINITIONS

    def __init__(self, pid: int) -> None:
        with _psutil_errors():
            self._process = psutil.Process(pid)

    def memory(self) -> Memory:
        """Return memory by kind: what only this process uses, and the rest. Takes milliseconds."""
        with _psutil_errors():
            resident = alone = self._process.memory_info().rss
            with suppress(psutil.AccessDenied):
                alone = getattr(self._process.memory_full_info(), "uss", resident)
        if not resident:  # ended, but its parent has not waited for it yet
            raise ProcessLookupError(ENDED)
        return Memory(alone, other_files=max(0, resident - alone))

    def totals(self) -> Totals:
        """Return the sums, on Linux in microseconds."""
        memory = self.memory()
        return Totals(memory.unevictable, memory.resident)


class LinuxReader(MemoryReader):
    """Reads /proc/PID/smaps, where each mapping names its file, and /proc/PID/status."""

    definitions = DEFINITIONS

    def __init__(self, pid: int, files: FileKinds, proc: Path = PROC) -> None:
        self._folder, self._files = proc / str(pid), files

    def memory(self) -> Memory:
        """Return memory by kind, of all mappings at one moment."""
        sums = dict.fromkeys(DEFINITIONS, 0)
        kind, in_shared = "anonymous", False
        text = os.fsdecode((self._folder / "smaps").read_bytes())
        if not text:  # ended, but its parent has not waited for it yet
            raise ProcessLookupError(ENDED)
        for line in text.split("\n"):  # not splitlines, which would cut names at other characters
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # a mapping: addresses, flags, offset, device, inode, path
                kind, in_shared = self._kind(rest), rest[3:4] == "s"
            elif first == "Rss:":
                sums[kind] += _kilobytes(rest)
            elif first == "Anonymous:" and kind != "anonymous":
                # Pages that were written to through a private mapping are copies: the system cannot
                # read them from the file again.
                sums[kind] -= _kilobytes(rest)
                sums["anonymous"] += _kilobytes(rest)
            elif first == "Swap:" and not in_shared:  # as in VmSwap, so that both agree
                sums["swap"] += _kilobytes(rest)
        return Memory(**sums)

    def _kind(self, mapping: str) -> str:
        parts = mapping.split(None, 4)
        path = parts[4].removesuffix(DELETED) if len(parts) > 4 else ""
        if path.startswith(SHARED_NAMES):
            return "shared"
        return self._files.kind(path) if path.startswith("/") else "anonymous"

    def totals(self) -> Totals:
        """Return the sums of status, or of all mappings if it lacks them."""
        status = self._status()
        if "RssAnon" not in status:  # some sandboxes imitate /proc without this line
            return super().totals()
        return Totals(status["RssAnon"] + status.get("VmSwap", 0), status["VmRSS"])

    def _status(self) -> dict[str, int]:
        # Not strictly ASCII, because a program may choose any bytes as its name.
        lines = (self._folder / "status").read_text("ascii", "replace").splitlines()
        pairs = (line.partition(":")[::2] for line in lines)
        found = {name: _kilobytes(rest) for name, rest in pairs if name in STATUS}
        if "VmRSS" not in found:
            raise ProcessLookupError(ENDED)
        return found


def open_reader(pid: int, files: FileKinds) -> MemoryReader:
    """Return the reader that tells most on this system."""
    # Linux kernels can be built without smaps.
    if sys.platform == "linux" and (PROC / "self" / "smaps").exists():
        return LinuxReader(pid, files)
    return MemoryReader(pid)


@contextmanager
def _psutil_errors() -> Iterator[None]:
    """Raise errors of psutil as OSError."""
    try:
        yield
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from error


def _as_shown(folder: Path) -> list[str]:
    """Return a folder and what its links stand for (in a hub's cache, all files) as /proc shows it.

    Only newlines, which would end its line, are escaped.
    """
    links = (path for path in folder.rglob("*") if path.is_symlink())
    return [str(path.resolve()).replace("\n", "\\012") for path in (folder, *links)]


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) << 10
