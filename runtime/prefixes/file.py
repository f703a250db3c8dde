"""Prefix files: a prompt's token ids, with their keys and values.

The format is safetensors. The first tensors are the token ids and the positions where steps began. The last
tensor is the CRC-32C of all bytes before it. Only tokens that look up their own rows are written. The name of
a file tells which model and options it is for (folder.py). Only the user who wrote a file may read it, because it contains prompts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google_crc32c import extend

from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.context import PromptKey

FORMAT = "3"
# Names of prefix files and of temporary files. Other files of the folder are not touched.
PREFIX_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors")
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{16}\.tmp")
MOST_HEADER_NBYTES = 1 << 20
IDS, STARTS, CHECKSUM = "token_ids", "starts", "crc32c"
FIRST = {IDS: "<u4", STARTS: "<u4"}
DTYPES = {"F32": "<f4", "F16": "<f2", "I8": "|i1", "U8": "|u1", "U32": "<u4", "I64": "<i8"}
NAMES = {np.dtype(value).str: name for name, value in DTYPES.items()}


class UnusableError(ValueError):
    """A file is not a complete prefix file, or its bytes are damaged."""


@dataclass(frozen=True)
class _Tensor:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_prefix(path: Path, prompt: PromptKey, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Write a prefix file with mode 0600, replacing an existing one atomically. Raises OSError."""
    tensors = _first(prompt) | {f"{n:04}": array for n, array in enumerate(arrays)}
    disk.write_whole(path, _pieces(tensors), durable=True, mode=0o600)


def _first(prompt: PromptKey) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors that come before keys and values in the file."""
    values = {IDS: prompt.token_ids, STARTS: prompt.starts}
    return {name: np.array(values[name], dtype) for name, dtype in FIRST.items()}


def _pieces(tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    """Yield the contents of a file, its checksum last; keys and values head by head."""
    yield (header := _header(tensors))
    crc = extend(0, header)
    for array in tensors.values():
        for part in array if array.ndim > 2 else [array]:
            yield (data := part.tobytes())
            crc = extend(crc, data)
    yield crc.to_bytes(4, "little")


def _header(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
    at = 0
    for name, array in (*tensors.items(), (CHECKSUM, np.zeros(1, "<u4"))):
        offsets = [at, at + array.nbytes]
        dtype = NAMES[array.dtype.str]
        described[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class PrefixFile:
    """An open file with a cached prompt's ids, keys and values. Raises UnusableError, OSError.

    own: True if no other user can have written the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.size = descriptor, disk.size(descriptor)
        self.own = is_own(os.fstat(descriptor))
        try:
            self.prompt, self._tensors = self._read_header()
        except (
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            RecursionError,
            AttributeError,
        ) as error:
            raise UnusableError("not a prefix") from error

    def fits(self, views: Sequence[npt.NDArray[Any]]) -> bool:
        """True if the file's keys and values have the types and widths of these arrays.

        views [..., tokens, width] may have fewer tokens than the file.
        """
        count = len(self.prompt.token_ids)
        found = [(tensor.shape, tensor.dtype) for tensor in self._tensors[len(FIRST) : -1]]
        return found == [((*view.shape[:-2], count, view.shape[-1]), view.dtype) for view in views]

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the arrays of keys and values. After the last, raises UnusableError if a byte is damaged.

        Each array overwrites the previous one, because all together would take the memory of another context.
        """
        tensors = self._tensors[len(FIRST) : -1]
        buffer = np.empty(max((tensor.nbytes for tensor in tensors), default=0), np.uint8)
        crc = extend(0, self._read(0, self._tensors[len(FIRST)].offset))
        for tensor in tensors:
            data = self._fill(buffer[: tensor.nbytes], tensor.offset)
            crc = extend(crc, data)
            yield data.view(tensor.dtype).reshape(tensor.shape)
        if crc.to_bytes(4, "little") != self._read(self._tensors[-1].offset, 4).tobytes():
            raise UnusableError("damaged")

    def _read(self, offset: int, nbytes: int) -> U8:
        return self._fill(np.empty(nbytes, np.uint8), offset)

    def _fill(self, buffer: U8, offset: int) -> U8:
        if disk.fill(self._descriptor, buffer.data, offset) != len(buffer):
            raise UnusableError("cut short")
        return buffer

    def _read_header(self) -> tuple[PromptKey, list[_Tensor]]:
        length = int.from_bytes(self._read(0, 8).tobytes(), "little")
        if length > min(MOST_HEADER_NBYTES, self.size):
            raise UnusableError("not a prefix")
        header = json.loads(self._read(8, length).tobytes())
        if header.pop("__metadata__")["format"] != FORMAT:
            raise UnusableError("another format")
        names = [*FIRST, *(f"{n:04}" for n in range(len(header) - len(FIRST) - 1)), CHECKSUM]
        tensors, at = list[_Tensor](), 8 + length
        for name in names:
            tensors.append(_tensor(header[name], at, 8 + length))
            at += tensors[-1].nbytes
        if at != self.size or tensors[-1].nbytes != 4:
            raise UnusableError("cut short")
        found = dict[str, npt.NDArray[Any]]()
        for tensor, (name, dtype) in zip(tensors, FIRST.items(), strict=False):
            if tensor.dtype != dtype or len(tensor.shape) != 1:
                raise UnusableError(f"{name} are none")
            found[name] = self._read(tensor.offset, tensor.nbytes).view(dtype)
        return PromptKey(found[IDS].tolist(), {}, found[STARTS].tolist()), tensors


def _tensor(entry: Mapping[str, Any], at: int, data: int) -> _Tensor:
    """Return the tensor of a header entry. It must begin at byte `at` of the file. data: where the header ends."""
    tensor = _Tensor(np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"]), at)
    if entry["data_offsets"] != [at - data, at - data + tensor.nbytes]:
        raise UnusableError("tensors have gaps")
    return tensor


def is_own(found: os.stat_result) -> bool:
    """True if this user owns a file or folder, and no other user can write to it."""
    getuid: Callable[[], int] | None = getattr(os, "getuid", None)
    return getuid is None or (found.st_uid == getuid() and not found.st_mode & 0o022)
