"""Reading GGUF files: the checked header of backbone.gguf. The values of tensors are not read.

Version 3, little-endian (ggml's docs/gguf.md):

    "GGUF"   version uint32, number of tensors uint64, number of keys uint64
    keys     of each: name, type of value uint32, value
    tensors  of each: name, dimensions uint32, their sizes uint64 (inputs first), type uint32,
             offset in the data uint64
    data     the tensors' values, each padded to the alignment, as is what is before them

A string is its bytes' number (uint64) and UTF-8, an array the type of its values (uint32), their
number (uint64) and the values.

ggml ends the process when a tensor is not what it should be, so nothing unchecked may reach it:
every number in the file is compared with what the file can hold before anything is read or
allocated by it, and tensors must fill the data without gaps. Files of other programs with their
tokenizers are read, too; what is not needed is checked and not kept.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from stem_edge import disk
from stem_edge.errors import BundleError
from stem_edge.ggml_types import WEIGHT_TYPES, TensorType
from stem_edge.gguf_schema import Value

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16  # a page of any system
# Memory that reading may take. A tokenizer of 262,144 tokens with its merges has about 17 MB.
MAX_HEADER_NBYTES = 1 << 26
MAX_KEYS = 1 << 12
# The deepest of the models that there are have some 130 layers of up to 20 tensors. Each costs time.
MAX_TENSORS = 1 << 13
MAX_KEY_NBYTES = 256
MAX_TENSOR_NAME_NBYTES = 63  # ggml's 64, one of them for the end mark
LEAST_KEY_NBYTES, LEAST_TENSOR_NBYTES, LENGTH_NBYTES = 14, 33, 8
PIECE_NBYTES = 1 << 16
MAX_KEPT_STRING_NBYTES = 1 << 20
# Of the whole file: a value in memory takes up to 40 bytes, and a string its time.
MAX_KEPT_VALUES = 1 << 16
MAX_STRINGS = 1 << 21  # a tokenizer of 262,144 tokens has 780,000 with its merges
KEPT_ARRAYS = ("general.", "stem.")

# Types of values -> their codes in the struct module.
NUMBERS = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
EXPORT_AGAIN = "export the backbone again with: stem-edge export CHECKPOINT OUT --engine gguf"


class GgufTensor(NamedTuple):
    """A tensor in a file. Its shape is [outputs, inputs] or [n], the reverse of the file's."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    nbytes: int


class GgufFile(msgspec.Struct, frozen=True):
    """What the header of a file says.

    metadata has numbers, bools, strings up to 1 MiB, and of the keys `general.*` and `stem.*` arrays
    of integers or bools, up to 65536 values together. Others are not kept: tokenizers.
    """

    path: Path
    nbytes: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]  # in the order of the header


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header. Raises BundleError."""
    try:
        with disk.Reader(path) as file:
            return _parse(path, _Header(file, file.nbytes))
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read ({error.strerror}); restore the file or {EXPORT_AGAIN}"
        ) from error
    except ValueError as error:
        raise _refusal(path, error) from error


def parse_gguf(data: bytes, path: Path) -> GgufFile:
    """The same from the bytes of a file, which `path` names in messages. Raises BundleError."""
    try:
        return _parse(path, _Header(io.BytesIO(data), len(data)))
    except ValueError as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: ValueError) -> BundleError:
    return BundleError(
        f"{path}: not a GGUF file that stem-edge reads ({error}); if it was copied, copy it "
        f"again, else {EXPORT_AGAIN}"
    )


class _Header:
    """A file's header, read as far as it was asked for. Methods raise ValueError."""

    def __init__(self, file: BinaryIO | io.RawIOBase, nbytes: int) -> None:
        self.file, self.nbytes = file, nbytes
        self.limit = min(nbytes, MAX_HEADER_NBYTES)
        self.data = bytearray()
        self.at = 0  # first byte that was not taken
        self.may_keep, self.may_pass = MAX_KEPT_VALUES, MAX_STRINGS

    def reach(self, end: int, what: str) -> int:
        """Have the bytes before `end` in `data`; returns how many bytes are there."""
        if end > self.limit:
            whole = "file" if self.limit == self.nbytes else "longest header"
            raise ValueError(f"{what} ends at byte {end}, but the {whole} at {self.limit}")
        while len(self.data) < end:
            piece = self.file.read(max(PIECE_NBYTES, end - len(self.data)))
            if not piece:
                raise ValueError(f"it ends at byte {len(self.data)} while it is read")
            self.data += piece
        return len(self.data)

    def take(self, code: str, count: int, what: str) -> int:
        """Go past `count` numbers; returns where they begin."""
        start, end = self.at, self.at + count * struct.calcsize("<" + code)
        self.reach(end, what)
        if code == "?" and self.data[start:end].translate(None, b"\0\1"):
            raise ValueError(f"{what} has a bool at byte {start} that is neither 0 nor 1")
        self.at = end
        return start

    def numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        """The next `count` numbers."""
        start = self.take(code, count, what)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def number(self, code: str, what: str) -> Any:
        """The next number."""
        return self.numbers(code, 1, what)[0]

    def count(self, what: str, each: int, most: int) -> int:
        """The next number, of things that take at least so many bytes each."""
        found: int = self.number("Q", what)
        possible = min(most, (self.limit - self.at) // each)
        if found > possible:
            raise ValueError(f"{found} {what}, but there is room for {possible}")
        return found

    def string(self, what: str) -> str:
        """The next string."""
        return self._decoded(self.number("Q", what), what)

    def name(self, what: str, most: int) -> str:
        """The next string, if it can be the name of something."""
        nbytes = self.number("Q", what)
        if not 1 <= nbytes <= most:
            raise ValueError(f"{what} at byte {self.at} has {nbytes} bytes, expected 1 to {most}")
        found = self._decoded(nbytes, what)
        if not found.isprintable():
            raise ValueError(f"{what} {found!r} is not printable")
        return found

    def _decoded(self, nbytes: int, what: str) -> str:
        start, end = self.at, self.at + nbytes
        self.reach(end, what)
        self.at = end
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} at byte {start} is not UTF-8") from error

    def pass_strings(self, count: int, what: str) -> None:
        """Go past strings: a vocabulary has a quarter of a million, so nothing is called for each."""
        data, have, end = self.data, len(self.data), self.at
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = end + LENGTH_NBYTES
                if start > have:
                    have = self.reach(start, what)
                end = start + unpack(data, end)[0]
                if end > have:
                    have = self.reach(end, what)
                data[start:end].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} has a string at byte {start} that is not UTF-8") from error
        self.at = end


def _parse(path: Path, header: _Header) -> GgufFile:
    _check_start(header)
    tensor_count = header.count("tensors", LEAST_TENSOR_NBYTES, MAX_TENSORS)
    key_count = header.count("keys", LEAST_KEY_NBYTES, MAX_KEYS)
    metadata: dict[str, Value | None] = {}
    for _ in range(key_count):
        key = header.name("key", MAX_KEY_NBYTES)
        if key in metadata:
            raise ValueError(f"key {key!r} is there more than once")
        metadata[key] = _value(header, f"key {key!r}", key.startswith(KEPT_ARRAYS))
    tensors: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        tensor = _tensor(header)
        if tensor.name in tensors:
            raise ValueError(f"tensor {tensor.name!r} is there more than once")
        tensors[tensor.name] = tensor
    alignment = _alignment(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
    start = _padded(header.at, alignment)
    _check_places(tensors.values(), start, alignment, header.nbytes)
    return GgufFile(
        path=path,
        nbytes=header.nbytes,
        metadata={key: value for key, value in metadata.items() if value is not None},
        tensors={n: t._replace(offset=start + t.offset) for n, t in tensors.items()},
    )


def _check_start(header: _Header) -> None:
    found = bytes(header.data[: header.reach(len(MAGIC), "GGUF's mark")])[: len(MAGIC)]
    if found != MAGIC:
        raise ValueError(f"it begins with {found!r}, expected {MAGIC!r}")
    header.at = len(MAGIC)
    version = header.number("I", "version")
    if version and version & 0xFFFF == 0:
        raise ValueError("it is big-endian, expected little-endian")
    if version != VERSION:
        raise ValueError(f"it has version {version}, expected {VERSION}")


def _value(header: _Header, what: str, keep_array: bool) -> Value | None:
    """The next value with its type; None: it is not kept."""
    kind = header.number("I", what)
    if kind == STRING:
        start = header.at
        found = header.string(what)
        return found if header.at - start <= MAX_KEPT_STRING_NBYTES else None
    if kind != ARRAY:
        value: Value = header.number(_code(kind, what), what)
        return value
    kind = header.number("I", what)
    if kind == STRING:
        count = header.count(f"strings in {what}", LENGTH_NBYTES, header.may_pass)
        header.may_pass -= count
        header.pass_strings(count, what)
        return None
    if kind == ARRAY:
        raise ValueError(f"{what} is an array of arrays")
    code = _code(kind, what)
    count = header.count(f"values in {what}", struct.calcsize("<" + code), header.limit)
    if keep_array and code not in "fd" and count <= header.may_keep:
        header.may_keep -= count
        return header.numbers(code, count, what)
    header.take(code, count, what)
    return None


def _code(kind: int, what: str) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"{what} has a value of type {kind}, which is unknown")
    return NUMBERS[kind]


def _tensor(header: _Header) -> GgufTensor:
    """The next tensor; its offset is that in the data."""
    name = header.name("name of a tensor", MAX_TENSOR_NAME_NBYTES)
    what = f"tensor {name!r}"
    dimensions = header.number("I", what)
    if not 1 <= dimensions <= 2:
        raise ValueError(f"{what} has {dimensions} dimensions, expected 1 or 2")
    shape = header.numbers("Q", dimensions, what)[::-1]
    number = header.number("I", what)
    if number not in WEIGHT_TYPES:
        known = ", ".join(f"{n} ({type.name})" for n, type in WEIGHT_TYPES.items())
        raise ValueError(f"{what}: tensor type {number} is unknown; expected one of {known}")
    type = WEIGHT_TYPES[number]
    if min(shape) < 1 or shape[-1] % type.block:
        raise ValueError(
            f"{what} is {type.name} {list(shape)}; expected rows of a multiple of {type.block} values"
        )
    # These are Python's integers: no product is too great to be compared with the file's size.
    nbytes = prod(shape[:-1]) * type.row_nbytes(shape[-1])
    return GgufTensor(name, type, shape, header.number("Q", what), nbytes)


def _alignment(value: Value | None) -> int:
    if not isinstance(value, int) or value.bit_count() != 1 or not 32 <= value <= MAX_ALIGNMENT:
        raise ValueError(
            f"{ALIGNMENT_KEY} is {str(value)[:20]}; expected a power of two, 32 to {MAX_ALIGNMENT}"
        )
    return value


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _check_places(
    tensors: Iterable[GgufTensor], start: int, alignment: int, file_nbytes: int
) -> None:
    """Tensors, whose data begin at `start`, follow each other to the end of the file.

    So they are aligned, none lies outside of the file or in another, and nothing is between them.
    """
    end = start
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        offset = _padded(end, alignment)
        if start + tensor.offset != offset:
            raise ValueError(
                f"tensor {tensor.name!r} is at offset {tensor.offset} of the data, expected "
                f"{offset - start}: the end of what is before it, aligned to {alignment}"
            )
        end = offset + tensor.nbytes
        if end > file_nbytes:
            raise ValueError(
                f"tensor {tensor.name!r} of {tensor.nbytes} bytes ends at byte {end}, but the file "
                f"at {file_nbytes}"
            )
    if file_nbytes > _padded(end, alignment):
        raise ValueError(f"{file_nbytes - end} bytes are left after its data, which end at {end}")
