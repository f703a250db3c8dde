"""A prefix as a file: token ids, keys and values as they lie in a context, and what they depend on.

The format is safetensors. The first tensor has the token ids, the last one the CRC-32C of all bytes
before it. Only tokens that look up their own rows are written, so ids and the fingerprint say all.
A file is read by nobody but its user: it tells what was asked.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from google_crc32c import extend

from stem_edge.errors import InputError
from stem_edge.files import disk

FORMAT = "1"
SUFFIX, TEMPORARY = ".safetensors", ".tmp"
MOST_HEADER_NBYTES = 64 << 20
MOST_TENSORS = 4096
IDS, CHECKSUM = "token_ids", "crc32c"
DTYPES = {"F32": "<f4", "F16": "<f2", "I8": "|i1", "U8": "|u1", "U32": "<u4", "I64": "<i8"}
NAMES = {np.dtype(value).str: name for name, value in DTYPES.items()}


class UnusableError(ValueError):
    """A file is not a whole prefix of this form, or its bytes are damaged."""


@dataclass(frozen=True)
class Saved:
    """What a file says of its prefix."""

    fingerprint: str  # of all that keys and values depend on, beside the ids
    token_ids: list[int]
    starts: list[int]  # where the steps began that computed them
    messages: str = ""  # JSON of the conversation that was saved


@dataclass(frozen=True)
class _Tensor:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_prefix(path: Path, saved: Saved, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Write a file of mode 0600 and rename it over an older one. Raises OSError."""
    ids, checksum = np.array(saved.token_ids, "<u4"), np.zeros(1, "<u4")
    tensors = {IDS: ids} | {f"{n:04}": array for n, array in enumerate(arrays)}
    beside = path.parent / f".{secrets.token_hex(8)}{TEMPORARY}"
    try:
        descriptor = disk.create(beside, 0o600)
        try:
            crc = 0
            for data in _pieces(_header(saved, tensors | {CHECKSUM: checksum}), tensors):
                crc = extend(crc, data)
                disk.write_all(descriptor, data)
            disk.write_all(descriptor, crc.to_bytes(4, "little"))
            disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
        disk.rename(beside, path)
    except BaseException:
        with suppress(OSError):
            disk.remove(beside)
        raise


def _pieces(header: bytes, tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    yield header
    for array in tensors.values():
        yield np.ascontiguousarray(array).tobytes()


def _header(saved: Saved, tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    described: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "fingerprint": saved.fingerprint,
            "starts": json.dumps(saved.starts),
            "messages": saved.messages,
        }
    }
    at = 0
    for name, array in tensors.items():
        offsets = [at, at + array.nbytes]
        dtype = NAMES[array.dtype.str]
        described[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class PrefixFile:
    """An open file, whose header was read. Raises UnusableError, OSError.

    own: it is this user's, and nobody else can have written it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = disk.open_file(path)
        try:
            self.size = disk.size(self._descriptor)
            self.own = is_own(os.fstat(self._descriptor))
            try:
                self.saved, self._tensors = self._read_header()
            except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
                raise UnusableError("not a prefix") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        disk.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fits(self, views: Sequence[npt.NDArray[Any]]) -> bool:
        """Return whether its keys and values have the types and shapes of these."""
        found = [(tensor.shape, tensor.dtype) for tensor in self._tensors[1:-1]]
        return found == [(view.shape, view.dtype) for view in views]

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """Yield keys and values; after the last one, raise UnusableError for damaged bytes.

        One by one, because all of them together would take the memory of another context.
        """
        before = self._tensors[1].offset if len(self._tensors) > 2 else self._tensors[-1].offset
        crc = extend(0, self._read(0, before))
        for tensor in self._tensors[1:-1]:
            data = self._read(tensor.offset, tensor.nbytes)
            crc = extend(crc, data)
            yield np.frombuffer(data, tensor.dtype).reshape(tensor.shape)
        if crc.to_bytes(4, "little") != self._read(self._tensors[-1].offset, 4):
            raise UnusableError("damaged")

    def check(self) -> None:
        """Read everything. Raises UnusableError for damaged bytes."""
        for _ in self.arrays():
            pass

    def _read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        if disk.fill(self._descriptor, memoryview(buffer), offset) != nbytes:
            raise UnusableError("cut short")
        return bytes(buffer)

    def _read_header(self) -> tuple[Saved, list[_Tensor]]:
        length = int.from_bytes(self._read(0, 8), "little")
        if length > min(MOST_HEADER_NBYTES, self.size):
            raise UnusableError("not a prefix")
        header = json.loads(self._read(8, length))
        about = header.pop("__metadata__")
        if about["format"] != FORMAT or not 2 <= len(header) <= MOST_TENSORS:
            raise UnusableError("another format")
        names = [IDS, *(f"{n:04}" for n in range(len(header) - 2)), CHECKSUM]
        tensors, at = list[_Tensor](), 8 + length
        for name in names:
            tensors.append(_tensor(header[name], at, 8 + length))
            at += tensors[-1].nbytes
        if at != self.size or tensors[-1].nbytes != 4:
            raise UnusableError("cut short")
        ids = np.frombuffer(self._read(tensors[0].offset, tensors[0].nbytes), tensors[0].dtype)
        starts = [int(start) for start in json.loads(about["starts"])]
        saved = Saved(str(about["fingerprint"]), ids.tolist(), starts, str(about["messages"]))
        return saved, tensors


def _tensor(entry: Mapping[str, Any], at: int, data: int) -> _Tensor:
    """Return the tensor that an entry describes, if it begins at this place of the file."""
    shape = tuple(entry["shape"])
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise UnusableError("a shape is none")
    tensor = _Tensor(np.dtype(DTYPES[entry["dtype"]]), shape, at)
    if entry["data_offsets"] != [at - data, at - data + tensor.nbytes]:
        raise UnusableError("tensors have gaps")
    return tensor


def is_own(found: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and nobody else can write to it."""
    getuid: Callable[[], int] | None = getattr(os, "getuid", None)
    return getuid is None or (found.st_uid == getuid() and not found.st_mode & 0o022)


def check_conversation(path: Path) -> None:
    """Raise InputError unless a file is a saved conversation; its bytes are not checked."""
    try:
        with PrefixFile(path) as file:
            if file.saved.messages:
                return
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror}); give another file") from error
    except UnusableError:
        pass
    raise InputError(f"{path}: not a saved conversation; give another file")
