"""What the memory of a process is made of, and what each kind means on this system.

People argue about "uses 5 GB" because one number is made of kinds that behave differently: anonymous
memory can get a process killed, pages of files the system takes back whenever it likes.
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
STATUS = ("VmRSS", "VmHWM", "VmSwap", "RssAnon")  # read in /proc/PID/status
LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")
DELETED = " (deleted)"  # what Linux appends to the name of a file that is gone
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
# Where the system tells less: psutil's figures, under the names that mean most nearly the same.
PORTABLE_DEFINITIONS = {
    "anonymous": "USS of psutil: memory that no other process uses and that would be free if this "
    "one ended, with pages of files that only it has mapped; all resident memory where psutil may "
    "not ask, as on macOS without rights",
    "other_files": "resident memory that is not in USS: pages shared with other processes",
}


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process by kind, and what is in swap; None where the system is silent."""

    anonymous: int
    swap: int | None = None
    backbone: int | None = None
    tables: int | None = None
    libraries: int | None = None
    other_files: int | None = None
    shared: int | None = None

    @property
    def resident(self) -> int:
        """Bytes in memory: all kinds but swap."""
        return sum(self.kinds().values()) - (self.swap or 0)

    @property
    def unevictable(self) -> int:
        """Anonymous memory and swap: what `memory=` of stem_edge.load limits."""
        return self.anonymous + (self.swap or 0)

    def kinds(self) -> dict[str, int]:
        """Kind -> bytes, of those that are known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Totals:
    """What is cheap to ask for many times a second."""

    unevictable: int  # anonymous memory and swap
    resident: int


class FileKinds:
    """Which kind a mapped file is, by its place."""

    def __init__(self, tables: Path, backbone: tuple[Path, ...]) -> None:
        self._tables, self._backbone = _as_shown(tables), [_as_shown(path) for path in backbone]

    def kind(self, path: str) -> FileKind:
        """Kind of a mapped file; the table store lies inside the bundle, so it comes first."""
        if _inside(path, self._tables):
            return "tables"
        if any(_inside(path, folder) for folder in self._backbone):
            return "backbone"
        name = path.rsplit("/", 1)[-1]
        in_bin = path.rsplit("/", 2)[-2:-1] == ["bin"]
        return "libraries" if in_bin or LIBRARY.search(name) else "other_files"


class MemoryReader:
    """Reads the memory of one process: what psutil tells on macOS, Windows and elsewhere.

    Methods raise OSError when it has ended.
    """

    definitions: Mapping[str, str] = PORTABLE_DEFINITIONS

    def __init__(self, pid: int) -> None:
        with _psutil_errors():
            self._process = psutil.Process(pid)

    def memory(self) -> Memory:
        """Ask for memory by kind: resident, and what no other process uses. Takes milliseconds."""
        with _psutil_errors():
            resident = alone = self._process.memory_info().rss
            with suppress(psutil.AccessDenied):
                alone = getattr(self._process.memory_full_info(), "uss", resident)
        if not resident:  # not waited for yet
            raise ProcessLookupError(ENDED)
        return Memory(alone, other_files=max(0, resident - alone))

    def totals(self) -> Totals:
        """Ask for sums, which takes microseconds on Linux."""
        memory = self.memory()
        return Totals(memory.unevictable, memory.resident)

    def begin_peak(self) -> None:
        """Let the system's own high-water mark begin anew; else it stays that of the whole life."""

    def peak_resident(self) -> int | None:
        """The system's high-water mark of resident bytes, which Windows has; None without one."""
        with _psutil_errors():
            peak = getattr(self._process.memory_info(), "peak_wset", None)
        return None if peak is None else int(peak)


class LinuxReader(MemoryReader):
    """Reads /proc/PID: smaps, where each mapping names its file, and status."""

    definitions = DEFINITIONS

    def __init__(self, pid: int, files: FileKinds, proc: Path = PROC) -> None:
        self._folder, self._files = proc / str(pid), files

    def memory(self) -> Memory:
        """Walk over all mappings once, so that the kinds belong together."""
        sums = dict.fromkeys(DEFINITIONS, 0)
        kind, in_shared = "anonymous", False
        text = os.fsdecode((self._folder / "smaps").read_bytes())
        if not text:  # of a process that has ended and was not waited for
            raise ProcessLookupError(ENDED)
        for line in text.split("\n"):  # splitlines would also split names at other characters
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # a mapping: addresses, flags, offset, device, inode, path
                kind, in_shared = self._kind(rest), rest[3:4] == "s"
            elif first == "Rss:":
                sums[kind] += _kilobytes(rest)
            elif first == "Anonymous:" and kind != "anonymous":
                # Pages of a private mapping that were written to are copies, the file's no longer.
                sums[kind] -= _kilobytes(rest)
                sums["anonymous"] += _kilobytes(rest)
            elif first == "Swap:" and not in_shared:  # VmSwap has none of shared memory, either
                sums["swap"] += _kilobytes(rest)
        return Memory(**sums)

    def _kind(self, mapping: str) -> str:
        parts = mapping.split(None, 4)
        path = parts[4].removesuffix(DELETED) if len(parts) > 4 else ""
        if path.startswith(SHARED_NAMES):
            return "shared"
        return self._files.kind(path) if path.startswith("/") else "anonymous"

    def totals(self) -> Totals:
        """Read status, or walk over all mappings where it has no such line."""
        status = self._status()
        if "RssAnon" not in status:  # sandboxes that only resemble Linux
            memory = self.memory()
            return Totals(memory.unevictable, memory.resident)
        return Totals(status["RssAnon"] + status.get("VmSwap", 0), status["VmRSS"])

    def begin_peak(self) -> None:
        """Ask the kernel to forget the mark."""
        # Without the right, or in a sandbox without the file, the mark stays. A process that has
        # ended is noticed by whatever is read next.
        with suppress(OSError):
            (self._folder / "clear_refs").write_text("5")

    def peak_resident(self) -> int | None:
        """Read VmHWM of status."""
        return self._status().get("VmHWM")

    def _status(self) -> dict[str, int]:
        # A program may call itself anything.
        lines = (self._folder / "status").read_text("ascii", "replace").splitlines()
        pairs = (line.partition(":")[::2] for line in lines)
        found = {name: _kilobytes(rest) for name, rest in pairs if name in STATUS}
        if "VmRSS" not in found:
            raise ProcessLookupError(ENDED)
        return found


def open_reader(pid: int, files: FileKinds) -> MemoryReader:
    """The reader that tells most on this system."""
    if sys.platform == "linux" and (PROC / "self" / "smaps").exists():  # small kernels have none
        return LinuxReader(pid, files)
    return MemoryReader(pid)


@contextmanager
def _psutil_errors() -> Iterator[None]:
    """Errors of psutil as those of the system."""
    try:
        yield
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from error


def _as_shown(path: Path) -> str:
    """A path as /proc shows it, which escapes the one character that would end the line."""
    return str(path.resolve()).replace("\n", "\\012")


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) << 10
