"""Every file of a bundle is written through here: hashed on the way and on disk when it counts.

A new bundle grows in a working folder beside its target and takes the target's name only when
every file and folder of it has been fsynced; until then what was there stays whole. The working
folder of an export that was interrupted stays, so that the next one can go on (export.journal).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from stem_edge.bundle import MANIFEST, FileEntry
from stem_edge.errors import ExportError
from stem_edge.whole_file import sync_folder

WORKING = ".stem-edge-"  # and the bundle's name: the working folder
LOCK = "lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BundleFile:
    """One file being written: a context manager that hashes, fsyncs, and then has an `entry`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb")
        self._digest = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)

    def align(self, boundary: int) -> int:
        """Pad with zeros to a multiple of `boundary`; returns the position."""
        self.write(bytes(-self.nbytes % boundary))
        return self.nbytes

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of what was written."""
        return FileEntry(self.nbytes, self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write one whole file."""
    with BundleFile(path) as file:
        file.write(data)
    return file.entry


@contextlib.contextmanager
def publish(out: Path, *, force: bool) -> Iterator[Path]:
    """Yields a working folder that becomes `out` when the block ends without an error.

    After an interrupt or on a full disk it stays, for the next export to the same target to go on;
    after any other error it goes. Raises ExportError when `out` exists and `force` is not set, when
    `out` is something other than a bundle (never deleted, even with force), when another export to
    it is under way, or when the disk is full.
    """
    _check_target(out, force)
    folder = out.with_name(WORKING + out.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise ExportError(
            f"{out}: another export to it is under way; wait for it, or choose another folder"
        ) from None
    except OSError as error:
        raise ExportError(f"{out.parent}: cannot write here ({error.strerror})") from error
    keep = False
    try:
        yield folder
        for below in sorted(p for p in folder.rglob("*") if p.is_dir()):
            sync_folder(below)
        lock.release()
        (folder / LOCK).unlink(missing_ok=True)
        sync_folder(folder)
        _replace(folder, out)
    except KeyboardInterrupt:
        keep = True
        raise
    except OSError as error:
        keep = error.errno in DISK_FULL
        if keep:
            raise ExportError(
                f"{out}: the disk is full ({shutil.disk_usage(out.parent).free:,} bytes free); free "
                f"some space and export again to go on from there, or delete {folder}"
            ) from error
        raise ExportError(f"{error.filename or out}: cannot write ({error.strerror})") from error
    finally:
        lock.release()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _check_target(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ExportError(
            f"{out}: exists already; choose another folder or replace it with --force"
        )
    empty = out.is_dir() and not any(out.iterdir())
    if out.is_symlink() or not (empty or (out / MANIFEST).is_file()):
        raise ExportError(f"{out}: exists and is not a bundle; --force replaces only bundles")


def _replace(folder: Path, out: Path) -> None:
    """Give `folder` the name `out`. A folder cannot replace another, so the old one steps aside."""
    if out.exists():
        aside = folder.with_name(folder.name + "-old")
        out.rename(aside)
        try:
            folder.rename(out)
        except OSError:
            aside.rename(out)
            raise
        sync_folder(out.parent)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(out)
    sync_folder(out.parent)
