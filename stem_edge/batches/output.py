"""The file of results: all that a batch keeps, and its only writer."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from stem_edge.batches.keys import Keys
from stem_edge.batches.rows import Result, known
from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.lock import lock

SYNC_SECONDS = 5.0  # of results that a power cut may lose; they are computed again
BEGIN = b'{"id":'  # of each line
NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP  # of shared disks
CLOSED = -1  # in place of a descriptor
MAX_LINE_NBYTES = 1 << 30  # so that what is no file of results is not read into memory


class ResultFile:
    """Results appended to a file, each once; rows in it are done.

    A last line without an end is dropped: the process that wrote it was killed, or the power went,
    which can leave zeros. retry_errors: drop lines of errors, too. Other processes cannot write it
    meanwhile. Raises InputError, as `append` and `close` do.
    """

    def __init__(self, path: Path, *, retry_errors: bool = False) -> None:
        self.path = path
        self.errors = 0  # lines that are errors
        self._keys, self._synced = Keys(), time.monotonic()
        with self._explained():
            self._file = _open(path)
            try:
                whole = self._read()
                if retry_errors and self.errors:
                    self._drop_errors()
                elif whole < disk.size(self._file):
                    disk.resize(self._file, whole)
            except BaseException:
                _close(self._file)
                raise

    def __contains__(self, key: bytes) -> bool:
        """Tell whether a row, by its key, is done."""
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, result: Result) -> bool:
        """Write a result; False if there is one of this row."""
        if result.key in self._keys:
            return False
        with self._explained():
            disk.write_all(self._file, result.data + b"\n")
            self._keys.add(result.key)
            self.errors += result.failed
            if time.monotonic() - self._synced > SYNC_SECONDS:
                disk.fsync(self._file)
                self._synced = time.monotonic()
        return True

    def close(self) -> None:
        """Return once all results are on the disk."""
        with self._explained():
            try:
                disk.fsync(self._file)
            finally:
                disk.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> int:
        """Note the rows that have results; return the bytes of whole lines."""
        whole = 0
        for line, is_error, key in _results(self.path):
            whole += len(line)
            self.errors += is_error
            self._keys.add(key)
        return whole

    def _drop_errors(self) -> None:
        """Put a file without errors into the place of this one."""
        path = self.path.resolve()  # the file itself, if it is a link
        beside = path.parent / f".{secrets.token_hex(8)}.tmp"
        self._keys, self.errors = Keys(), 0
        copy = disk.create(beside)
        try:
            _lock(copy, path)
            self._copy_answers(copy)
            if not disk.RENAMES_OPEN:  # so another batch may come between; then what follows fails
                disk.close(copy)
                disk.close(self._file)
                copy = self._file = CLOSED
            disk.rename(beside, path)
        except BaseException:
            _close(copy)
            with suppress(OSError):
                disk.remove(beside)
            raise
        _close(self._file)
        self._file = _open(path) if copy == CLOSED else copy
        disk.sync_folder(path.parent)

    def _copy_answers(self, copy: int) -> None:
        """Write the lines that are no errors into another file, and note their rows."""
        for line, is_error, key in _results(self.path):
            if not is_error:
                disk.write_all(copy, line)
                self._keys.add(key)
        disk.fsync(copy)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot write results ({error.strerror or error}); once it can be written, "
                "the same batch goes on"
            ) from error


def _close(file: int) -> None:
    """Close a file; its loss is not worth another error."""
    with suppress(OSError):
        disk.close(file)


def _open(path: Path) -> int:
    """Open a file for appending, and keep it for this process. Raises InputError, OSError."""
    with suppress(FileExistsError):
        disk.close(disk.create(path))
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened, which may wait for ever
        raise InputError(
            f"{path}: not a regular file; results need one, from which a batch goes on"
        )
    file = disk.append(path)
    # A batch that retries errors has put another file into the place of one that is not locked any more.
    try:
        if _lock(file, path) and os.path.samestat(os.fstat(file), path.stat()):
            return file
    except BaseException:
        _close(file)
        raise
    _close(file)
    raise InputError(f"{path}: another batch writes it; wait for it, or choose another output")


def _lock(file: int, path: Path) -> bool:
    """Take a file; False if another process has it. Warns, and goes on, where files have no locks."""
    try:
        return lock(file)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        found = f"files cannot be locked here ({error.strerror})"
        told = f"{path}: {found}; let no other batch write it meanwhile"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return True


def _results(path: Path) -> Iterator[tuple[bytes, bool, bytes]]:
    """Yield (line, whether it is an error, key) of whole lines. Raises InputError for other files."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_NBYTES):
            number += 1
            if _is_cut(line, number):
                return
            try:
                key, is_error = known(line)
            except ValueError:
                raise InputError(
                    f"{path}: line {number} is no result of a batch; choose another output"
                ) from None
            yield line, is_error, key


def _is_cut(line: bytes, number: int) -> bool:
    """Tell whether a line was cut while written; it shall look like the first line of the file."""
    if line.endswith(b"\n") or len(line) == MAX_LINE_NBYTES:
        return False
    return number > 1 or line.startswith(BEGIN[: len(line)]) or not line.strip(b"\0")
