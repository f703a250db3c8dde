"""Every file of a bundle is written through here: hashed on the way and on disk when it counts.

A new bundle grows in a working folder beside its target and takes the target's name only when
every file and folder of it has been fsynced; until then what was there stays whole. The working
folder of an export that was interrupted stays, so that the next one can go on (export.journal).

A power cut may lose or mix whatever was not synced, names included, so the order is: contents of
files, names in their folders, the new name, its parent folder; only then is anything old deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from stem_edge.bundle.manifest import MANIFEST, OLD, WORKING, FileEntry
from stem_edge.errors import ExportError
from stem_edge.files import disk
from stem_edge.units import format_size

LOCK = ".lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BUFFER_NBYTES = 1 << 20  # small writes are gathered


class Leftover(UserWarning):
    """An export that was cut off left something behind, and what was done with it."""


class BundleFile:
    """One file being written: a context manager that hashes, fsyncs, and then has an `entry`."""

    def __init__(self, path: Path) -> None:
        disk.make_folders(path.parent)
        self._path, self._descriptor = path, disk.create(path)
        self._gathered, self._digest = bytearray(), hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        self._digest.update(view)
        self.nbytes += view.nbytes
        if len(self._gathered) + view.nbytes > BUFFER_NBYTES:
            self._write(self._gathered)
            self._gathered = bytearray()
        if view.nbytes > BUFFER_NBYTES:
            self._write(view)
        else:
            self._gathered += view

    def align(self, boundary: int) -> int:
        """Pad with zeros to a multiple of `boundary`; returns the position."""
        self.write(bytes(-self.nbytes % boundary))
        return self.nbytes

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of what was written."""
        return FileEntry(self.nbytes, self._digest.hexdigest())

    def _write(self, data: bytearray | memoryview) -> None:
        try:
            disk.write_all(self._descriptor, memoryview(data))
        except OSError as error:
            error.filename = str(self._path)  # the system knows a number only
            raise

    def _finish(self) -> None:
        self._write(self._gathered)
        try:
            disk.fsync(self._descriptor)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            disk.close(self._descriptor)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write one whole file."""
    with BundleFile(path) as file:
        file.write(data)
    return file.entry


@dataclass
class Working:
    """A folder that will be a bundle."""

    folder: Path
    needed_nbytes: int = 0  # what is still to be written, at the least, once that is known


@contextlib.contextmanager
def publish(out: Path, *, force: bool) -> Iterator[Working]:
    """Yields a working folder that becomes `out` when the block ends without an error.

    After an interrupt or on a full disk it stays, for the next export to the same target to go on;
    after any other error in the block it goes. Raises ExportError when `out` exists and `force` is
    not set, when `out` is something other than a bundle (never deleted, even with force), when
    another export to it is under way, or when the disk is full or fails; then `out` is what it was.
    """
    check_target(out, force, "folder", "a bundle", _is_bundle)
    work, keep = Working(out.with_name(WORKING + out.name)), False
    again = f"export again to go on from there, or delete {work.folder}"
    with locked(out, "folder"), explained(out, work, again):
        _recover(out)
        check_target(
            out, force, "folder", "a bundle", _is_bundle
        )  # what was recovered, or is here since we looked
        try:
            disk.make_folders(work.folder)
            disk.sync_folder(out.parent)  # before anything that is left here is deleted
            yield work
            _sync_all(work.folder)
            keep = True  # from here on it may be the old bundle
            take_place(work.folder, out)
        except (KeyboardInterrupt, SystemExit):
            keep = True
            raise
        except OSError as error:
            keep = keep or error.errno in DISK_FULL
            raise
        finally:
            if not keep:
                with contextlib.suppress(OSError):
                    disk.remove_tree(work.folder)


@contextlib.contextmanager
def locked(out: Path, what: str) -> Iterator[None]:
    """Keeps other exports to `out` away, and makes the folder that it will be in.

    Raises ExportError if one is under way. The lock of a process that was killed is free.
    """
    lock = FileLock(out.with_name(WORKING + out.name + LOCK), timeout=0)
    try:
        _make_durable(out.parent)
        lock.acquire()
    except Timeout:
        if not Path(lock.lock_file).exists():  # /proc and the like take no files
            raise ExportError(f"{out.parent}: cannot write here; choose another {what}") from None
        raise ExportError(
            f"{out}: another export to it is under way; wait for it, or choose another {what}"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ExportError(f"{out.parent}: cannot write here ({reason}); check it") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps what is open
            Path(lock.lock_file).unlink()  # while it is ours: another one's must stay
        lock.release()


@contextlib.contextmanager
def explained(out: Path, work: Working, again: str) -> Iterator[None]:
    """An OSError of the block as an ExportError; again: what to do when there is room."""
    try:
        yield
    except OSError as error:
        place, reason = error.filename or out, error.strerror or str(error)
        if error.errno not in DISK_FULL:
            raise ExportError(
                f"{place}: cannot write ({reason}); check the storage device and its permissions, "
                "then export again"
            ) from error
        if error.errno == errno.EFBIG:
            raise ExportError(
                f"{place}: larger than a file may be here ({reason}); choose another disk or raise "
                f"ulimit -f, and {again}"
            ) from error
        more = format_size(work.needed_nbytes, up=True)
        needed = f", about {more} more are needed" if work.needed_nbytes else ""
        raise ExportError(
            f"{out}: the disk is full ({reason}; {format_size(free_nbytes(out))} free{needed}); free some "
            f"space and {again}"
        ) from error


def free_nbytes(out: Path) -> int:
    """Bytes that can be written beside `out`."""
    return shutil.disk_usage(out.parent).free


def check_free(out: Path, needed: int) -> None:
    """Raises ExportError unless so many bytes can be written beside `out`."""
    free = free_nbytes(out)
    if free < needed:
        raise ExportError(
            f"{out}: not enough room on its disk: {format_size(needed, up=True)} are needed, "
            f"{format_size(free)} are free; free some space or choose another disk"
        )


def check_target(
    out: Path, force: bool, place: str, kind: str, is_ours: Callable[[Path], bool]
) -> None:
    """Raises ExportError unless `out` is free, or with force something of ours, no link to it."""
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ExportError(
            f"{out}: exists already; choose another {place} or replace it with --force"
        )
    if out.is_symlink() or not is_ours(out):
        raise ExportError(
            f"{out}: exists and is not {kind}; choose another {place}: --force replaces only those"
        )


def _is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path.is_dir() and not any(path.iterdir()))


def _recover(out: Path) -> None:
    """Finish or undo what an export was doing to names when it was killed."""
    aside = _aside(out)
    if not aside.is_dir():
        return
    disk.sync_folder(out.parent)  # a name that a power cut would take back must not count
    if out.exists():
        disk.remove_tree(aside)
        return
    disk.rename(aside, out)
    disk.sync_folder(out.parent)
    warnings.warn(
        Leftover(f"{out}: an export that was to replace it was cut off; the bundle is here again"),
        stacklevel=2,
    )


def _aside(out: Path) -> Path:
    return out.with_name(WORKING + out.name + OLD)


def _make_durable(folder: Path) -> None:
    """Make a folder and those that it is in, where they are missing, durably."""
    if not folder.is_dir():
        _make_durable(folder.parent)
        disk.make_folders(folder)
        disk.sync_folder(folder.parent)


def _sync_all(folder: Path) -> None:
    """All names below; files were synced when they were written."""
    for below in sorted(p for p in folder.rglob("*") if p.is_dir()):
        disk.sync_folder(below)
    disk.sync_folder(folder)


def take_place(new: Path, out: Path) -> None:
    """Give `new` the name `out`, durably; what was there goes after that.

    After an OSError `out` is what it was, as far as the disk still obeys; nothing is deleted then,
    since nobody knows which of the names a power cut would bring back.
    """
    old, undo = _swap(new, out)
    try:
        disk.sync_folder(out.parent)
    except OSError:
        with contextlib.suppress(OSError):
            undo()
        raise
    if old is not None:
        _remove_old(old)


def _swap(new: Path, out: Path) -> tuple[Path | None, Callable[[], object]]:
    """Where what was there is now, and what takes it all back."""
    if not out.exists():
        disk.rename(new, out)
        return None, lambda: disk.rename(out, new)
    if disk.exchange(new, out):
        return new, lambda: disk.exchange(new, out)
    if out.is_file():
        disk.rename(new, out)  # at once and for good
        return None, lambda: None
    aside = _aside(out)
    disk.rename(out, aside)  # a folder cannot take the place of another

    def back() -> None:
        disk.rename(out, new)
        disk.rename(aside, out)

    try:
        disk.rename(new, out)
    except BaseException:
        disk.rename(aside, out)
        raise
    return aside, back


def _remove_old(old: Path) -> None:
    try:
        if old.is_dir():
            disk.remove_tree(old)
        else:
            disk.remove(old)
    except OSError as error:
        reason = error.strerror or str(error)
        warnings.warn(
            Leftover(f"{old}: what was replaced could not be deleted ({reason}); delete it"),
            stacklevel=2,
        )
