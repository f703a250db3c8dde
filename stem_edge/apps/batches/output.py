"""The file of results: all that a batch keeps, and its only writer."""

from __future__ import annotations

import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from stem_edge.apps.batches.rows import Key, Result, parse_result
from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.lock import lock

SYNC_SECONDS = 5.0  # a power cut may lose the results of these seconds; they are computed again
BEGIN = b'{"id":'  # of each line
MAX_LINE_NBYTES = 1 << 30  # so that a file of something else is not read into memory


class ResultFile:
    """Results appended to a file, one line each; rows in it are done.

    An unfinished last line is dropped: a killed process leaves one, and a power cut can leave zeros.
    Locks the file against other batches. Raises InputError, as `append` and `close` do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors = 0  # lines that are errors
        self._keys, self._synced = set[Key](), time.monotonic()
        with self._explained():
            self._file = _open(path)
            try:
                if (whole := self._read()) < disk.size(self._file):
                    disk.resize(self._file, whole)
            except BaseException:
                disk.close(self._file)
                raise

    def __contains__(self, key: Key) -> bool:
        """Return whether a row is done."""
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, result: Result) -> bool:
        """Write a result; False if the row has one already."""
        if result.key in self._keys:
            return False
        with self._explained():
            disk.write_all(self._file, result.data + b"\n")
            self._keys.add(result.key)
            self.errors += result.error is not None
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
        """Note which rows have results; return the bytes of whole lines."""
        whole = number = 0
        with self.path.open("rb") as file:
            while line := file.readline(MAX_LINE_NBYTES):
                number += 1
                if _is_cut(line, number):
                    break
                try:
                    key, is_error = parse_result(line)
                except ValueError:
                    raise InputError(
                        f"{self.path}: line {number} is no result of a batch; choose another output"
                    ) from None
                whole += len(line)
                self.errors += is_error
                self._keys.add(key)
        return whole

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot write results ({error.strerror or error}); once it can be "
                "written, the same command goes on"
            ) from error


def _open(path: Path) -> int:
    """Open a file for appending, locked. Raises InputError, OSError."""
    with suppress(FileExistsError):
        disk.close(disk.create(path))
    if not stat.S_ISREG(path.stat().st_mode):  # before opening, because opening a pipe may wait
        raise InputError(
            f"{path}: not a regular file; results need one, from which a batch goes on"
        )
    file = disk.append(path)
    if _lock(file, path):
        return file
    disk.close(file)
    raise InputError(f"{path}: another batch writes it; wait for it, or choose another output")


def _lock(file: int, path: Path) -> bool:
    """Lock a file; False if another process has it. Warns where the disk has no locks."""
    try:
        return lock(file)
    except OSError as error:
        told = f"cannot be locked here ({error.strerror}); let no other batch write it meanwhile"
        warnings.warn(f"{path}: {told}", RuntimeWarning, stacklevel=2)
        return True


def _is_cut(line: bytes, number: int) -> bool:
    """Return whether writing a line was cut; a first line must also look like a result."""
    if line.endswith(b"\n") or len(line) == MAX_LINE_NBYTES:
        return False
    return number > 1 or line.startswith(BEGIN[: len(line)]) or not line.strip(b"\0")
