"""The result file of a batch, which is also the record of the input rows that are done."""

from __future__ import annotations

import re
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from stem_edge.apps.batches.rows import Id, Key, Result, key_of
from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.lock import lock

SYNC_SECONDS = 5.0  # a power cut may lose the results of these seconds; they are computed again
BEGIN = b'{"id":'  # of each line
# Start of each line up to the id, which a kill may have cut anywhere; and what follows the id.
HEAD = re.compile(rb'\{"id":("(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[nul]+|-?\d*)')
AFTER_ID = b',"text":', b',"line":'


class _Line(msgspec.Struct):
    """Fields of a result line that a resumed batch reads: the row's id or line, and how it ended."""

    id: Id | None
    line: int = 0
    finish_reason: str | None = None
    error: dict[str, Any] | None = None


class ResultFile:
    """Append-only file with one result per line; rows that have a result are not run again.

    An unfinished last line, left by a killed process or a power cut, is dropped. The file is locked
    against other batches. Methods raise InputError for I/O errors and for a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = set[Key]()  # of rows that have a result
        self.errors = 0  # lines that are errors
        self.first_error: str | None = None  # with the line of its row
        self._synced = time.monotonic()
        with self._explained():
            self._file = _open(path)
            try:
                if (whole := self._read()) < disk.size(self._file):
                    disk.resize(self._file, whole)
            except BaseException:
                disk.close(self._file)
                raise

    def append(self, result: Result) -> bool:
        """Append a result, or return False if the file already has one for the same input row."""
        key = key_of(result["id"], result.get("line", 0))
        if key in self.keys:
            return False
        with self._explained():
            disk.write_all(self._file, msgspec.json.encode(result) + b"\n")
            self._note(key, result.get("line", 0), result.get("error"))
            if time.monotonic() - self._synced > SYNC_SECONDS:
                disk.fsync(self._file)
                self._synced = time.monotonic()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Flush all results to disk and close the file."""
        with self._explained():
            try:
                disk.fsync(self._file)
            finally:
                disk.close(self._file)

    def _read(self) -> int:
        """Record which rows have results; return the size of the complete lines in bytes."""
        whole = 0
        with self.path.open("rb") as file:
            begin = file.read(len(BEGIN))
            if not BEGIN.startswith(begin) and begin.strip(b"\0"):
                raise self._other(1)  # before reading a line, which may be very long
            file.seek(0)
            for number, line in enumerate(file, 1):
                try:
                    found = msgspec.json.decode(line, type=_Line)
                except ValueError:
                    if _is_cut(line):
                        break
                    raise self._other(number) from None
                if found.finish_reason is None and found.error is None:
                    raise self._other(number)
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self._note(key_of(found.id, found.line), found.line, found.error)
        return whole

    def _note(self, key: Key, line: int, error: Mapping[str, Any] | None) -> None:
        self.keys.add(key)
        if error is not None:
            self.errors += 1
            self.first_error = self.first_error or f"line {line}: {error.get('message')}"

    def _other(self, number: int) -> InputError:
        return InputError(
            f"{self.path}: line {number} is no result of a batch; choose another output"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot write results ({error.strerror or error}); once it can be "
                "written, the same command goes on"
            ) from error


def _is_cut(line: bytes) -> bool:
    """Return True if the line is an unfinished result, or zero bytes from a power cut."""
    if line.endswith(b"\n"):
        return False
    known = line.partition(b"\0")[0]
    if (head := HEAD.match(known)) is None:
        return BEGIN.startswith(known)
    rest = known[head.end() :]
    return any(rest.startswith(name) or name.startswith(rest) for name in AFTER_ID)


def _open(path: Path) -> int:
    """Open or create a locked file to append to; return its fd. Raises InputError, OSError."""
    with suppress(FileExistsError):
        disk.close(disk.create(path))
    if not stat.S_ISREG(path.stat().st_mode):  # before opening, because opening a pipe may wait
        raise InputError(
            f"{path}: not a regular file; results need one, from which a batch goes on"
        )
    file = disk.append(path)
    try:
        locked = lock(file)
    except OSError as error:
        told = f"cannot be locked here ({error.strerror}); let no other batch write it meanwhile"
        warnings.warn(f"{path}: {told}", RuntimeWarning, stacklevel=2)
        return file
    if not locked:
        disk.close(file)
        raise InputError(f"{path}: another batch writes it; wait for it, or choose another output")
    return file
