"""GGUF headers and protobuf messages that are changed field by field."""

from __future__ import annotations

import struct
from random import Random
from typing import NamedTuple

from fuzz_bytes import border, packed

MAX_FIELDS = 4000
NUMBERS = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIifBQqd", strict=True))
STRING, ARRAY = 8, 9


class Field(NamedTuple):
    """A number in a header and where it lies."""

    at: int
    code: str


class Entry(NamedTuple):
    """A key or a tensor: its bytes, and where its number is counted."""

    start: int
    end: int
    counter: int


class Walk:
    """Fields of a GGUF header as far as it can be read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 4
        self.fields: list[Field] = []
        self.entries: list[Entry] = []

    def number(self, code: str) -> int:
        (found,) = struct.unpack_from("<" + code, self.data, self.at)
        if len(self.fields) < MAX_FIELDS:
            self.fields.append(Field(self.at, code))
        self.at += struct.calcsize("<" + code)
        return int(found) if code not in "fd" else 0

    def string(self) -> None:
        nbytes = self.number("Q")
        self.at += nbytes
        if self.at > len(self.data):
            raise struct.error("cut")

    def value(self, kind: int) -> None:
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            for _ in range(min(count, MAX_FIELDS)):
                self.value(inner)
        else:
            self.number(NUMBERS[kind])

    def walk(self) -> None:
        self.number("I")
        tensors, keys = self.number("Q"), self.number("Q")
        for counter, count in ((16, keys), (8, tensors)):
            for _ in range(min(count, MAX_FIELDS)):
                start = self.at
                self.string()
                if counter == 16:
                    self.value(self.number("I"))
                else:
                    for _ in range(min(self.number("I"), 8)):
                        self.number("Q")
                    self.number("I")
                    self.number("Q")
                self.entries.append(Entry(start, self.at, counter))


def mutate_gguf(data: bytes, other: bytes, rng: Random) -> bytes:
    """A file with a number at a border, an entry more, less or moved, or with other text."""
    walk = Walk(data)
    try:
        walk.walk()
    except (struct.error, KeyError, RecursionError):
        if not walk.fields:
            raise ValueError("no GGUF") from None
    changed = bytearray(data)
    kind = rng.randrange(6)
    if kind < 3 or not walk.entries:
        for _ in range(rng.choice([1, 1, 2, 3])):
            _border_field(changed, rng.choice(walk.fields), rng)
    elif kind == 3:
        first, second = rng.choice(walk.entries), rng.choice(walk.entries)
        _replace_entry(changed, first, bytes(data[second.start : second.end]))
    elif kind == 4:
        entry = rng.choice(walk.entries)
        copies = rng.choice([0, 2, 3])
        _count(changed, entry.counter, copies - 1 if rng.randrange(4) else 0)
        _replace_entry(changed, entry, bytes(data[entry.start : entry.end]) * copies)
    else:
        entry = rng.choice(walk.entries)
        at = rng.randrange(entry.start, entry.end)
        changed[at] = rng.randrange(256)
    return bytes(changed)


def _border_field(data: bytearray, field: Field, rng: Random) -> None:
    nbytes = struct.calcsize("<" + field.code)
    old = int.from_bytes(data[field.at : field.at + nbytes], "little")
    number = rng.randrange(16) if rng.randrange(3) == 0 else border(rng, old)
    code = {1: "B", 2: "H", 4: "I", 8: "Q"}[nbytes]
    data[field.at : field.at + nbytes] = packed(number, code)


def _replace_entry(data: bytearray, entry: Entry, by: bytes) -> None:
    """Another entry instead; what follows the header keeps its alignment to 32 bytes."""
    grown = len(by) - (entry.end - entry.start)
    data[entry.start : entry.end] = by
    end = len(data) if grown <= 0 else min(len(data), entry.start + len(by))
    data[end:end] = b"\0" * (-grown % 32)


def _count(data: bytearray, at: int, step: int) -> None:
    (old,) = struct.unpack_from("<Q", data, at)
    data[at : at + 8] = packed(old + step, "Q")


class Part(NamedTuple):
    """A field of a message: number, wire type, and what it holds."""

    number: int
    wire: int
    value: int | bytes | list[Part]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("varint of more than ten bytes")


def encoded_varint(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_message(data: bytes, depth: int = 0) -> list[Part]:
    """Fields of a message; what may be a message inside of it is taken for one."""
    parts, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | bytes | list[Part]
        if wire == 0:
            value, at = _varint(data, at)
        elif wire in (1, 5):
            width = 8 if wire == 1 else 4
            value, at = data[at : at + width], at + width
        elif wire == 2:
            nbytes, at = _varint(data, at)
            value, at = data[at : at + nbytes], at + nbytes
            if depth < 8 and nbytes > 1:
                value = _inner(value, depth)
        else:
            raise ValueError(f"wire type {wire}")
        if number == 0 or at > len(data):
            raise ValueError("cut")
        parts.append(Part(number, wire, value))
    return parts


def _inner(value: bytes, depth: int) -> bytes | list[Part]:
    if value.isascii() and value.decode().isprintable():
        return value  # a name: letters are valid fields, too
    try:
        return decode_message(value, depth + 1)
    except (ValueError, IndexError):
        return value


def encode_message(parts: list[Part]) -> bytes:
    """Bytes of a message."""
    out = bytearray()
    for part in parts:
        out += encoded_varint(part.number << 3 | part.wire)
        if isinstance(part.value, int):
            out += encoded_varint(part.value)
            continue
        value = part.value if isinstance(part.value, bytes) else encode_message(part.value)
        out += encoded_varint(len(value)) + value if part.wire == 2 else value
    return bytes(out)


def _lists(parts: list[Part]) -> list[list[Part]]:
    found, stack = [], [parts]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += [part.value for part in node if isinstance(part.value, list)]
    return [node for node in found if node]


TEXTS = [
    b"",
    b"../x",
    b"/etc/passwd",
    b"location",
    b"offset",
    b"length",
    b"-1",
    b"\xff",
    b"x" * 300,
]
TEXTS += [b"com.microsoft", b"custom", b"18446744073709551616", b"a/b", b"\0"]


def mutate_message(data: bytes, other: bytes, rng: Random) -> bytes:
    """A protobuf message with changed fields, in messages inside of it, too."""
    try:
        parts = decode_message(data)
        donors = [part for node in _lists(decode_message(other)) for part in node]
    except IndexError as error:
        raise ValueError("cut") from error
    for _ in range(rng.choice([1, 1, 2, 3])):
        if nodes := _lists(parts):
            _change_field(rng.choice(nodes), donors, rng)
    return encode_message(parts)


def _change_field(node: list[Part], donors: list[Part], rng: Random) -> None:
    at = rng.randrange(len(node))
    part = node[at]
    kind = rng.randrange(8)
    if kind == 0:
        del node[at]
    elif kind == 1:
        node += [part] * rng.choice([1, 1, 2, 50])
    elif kind == 2:
        node[at] = part._replace(
            number=rng.choice([1, 2, 3, 4, 5, 7, 9, 13, 14, 15, 20, 536870911])
        )
    elif kind == 3:
        node.insert(at, rng.choice(donors) if donors else part)
    elif kind == 4:
        node[at] = Part(part.number, 2, rng.choice(TEXTS))
    elif kind == 5 and isinstance(part.value, bytes | list):
        inner = part.value if isinstance(part.value, bytes) else encode_message(part.value)
        node[at] = Part(part.number, part.wire, inner * rng.choice([2, 3]))
    elif kind == 6:
        depth = rng.choice([1, 5, 40, 400])
        for _ in range(depth):
            part = Part(rng.choice([part.number, 5, 6, 7]), 2, encode_message([part]))
        node[at] = part
    else:
        node[at] = Part(
            part.number, 0, border(rng, part.value if isinstance(part.value, int) else 0)
        )
