"""Every file of a bundle is written through here: hashed on the way and on disk when it counts.

A new bundle grows in a temporary folder beside its target and takes the target's name only when
every file and folder of it has been fsynced; until then what was there stays whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from stem_edge.bundle import MANIFEST, FileEntry
from stem_edge.errors import ExportError

TEMPORARY = ".stem-edge-"


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
    """Yields a temporary folder that becomes `out` when the block ends without an error.

    Raises ExportError when `out` exists and `force` is not set, when `out` is something other than
    a bundle (never deleted, even with force), or when the disk is full. Nothing temporary is left.
    """
    _check_target(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=out.parent))
    except OSError as error:
        raise ExportError(f"{out.parent}: cannot write here ({error.strerror})") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        for below in sorted(p for p in folder.rglob("*") if p.is_dir()):
            _sync_folder(below)
        _sync_folder(folder)
        _replace(folder, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ExportError(
                f"{out}: the disk is full ({shutil.disk_usage(out.parent).free:,} bytes free); "
                "nothing was changed: free some space or export elsewhere"
            ) from error
        raise ExportError(f"{error.filename or out}: cannot write ({error.strerror})") from error
    finally:
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
        _sync_folder(out.parent)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(out)
    _sync_folder(out.parent)


def _sync_folder(folder: Path) -> None:
    """Make names in a folder durable; Windows cannot open folders and needs no such call."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
