"""Reading protobuf messages of known fields, strictly: the wire format and nothing else.

A message is fields one after the other, each a tag (number * 8 + wire type) and its value:

    wire type 0   an integer in up to 10 bytes of 7 bits, lowest first (varint)
    wire type 2   a length (varint) and so many bytes: text, a message, or integers in a row
    wire type 5   4 bytes: float32

Other readers skip fields that they do not know, take the last of several, and descend as deep as
the file says. Two readers then see two things in one file, so here a field must be in the schema,
with the wire type and at most as often as that says. A schema holds no schema that holds itself:
that is the greatest depth. Every byte is looked at once a level, whatever the lengths claim.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

Kind = Literal["int", "ints", "float", "text", "bytes"]
Schema: TypeAlias = "Mapping[int, Field]"
Message = dict[str, Any]  # name -> value, or list of values of a field that may be repeated

VARINT, LENGTH, FIXED32 = 0, 2, 5
MAX_VARINT_NBYTES = 10
WIRE_TYPES: dict[str, int] = {"int": VARINT, "float": FIXED32}  # of all others LENGTH


class Field(NamedTuple):
    """A field of a message. One that may be there 0 times is refused by its name."""

    name: str
    kind: Kind | Schema
    most: int = 1


def decode(
    data: bytes, schema: Schema, what: str, start: int = 0, end: int | None = None
) -> Message:
    """The message in a span of bytes. Raises ValueError that says what is wrong at which byte."""
    message: Message = {field.name: [] for field in schema.values() if field.most > 1}
    at, end = start, len(data) if end is None else end
    while at < end:
        began, tag = at, data[at]
        tag, at = (tag, at + 1) if tag < 0x80 else _varint(data, at, end)
        field = schema.get(tag >> 3)
        if field is None or not field.most:
            name = f"{field.name} (field {tag >> 3})" if field else f"field {tag >> 3}"
            raise ValueError(f"{what} has {name} at byte {began}, which no graph of ours has")
        value, at = _value(data, field, tag & 7, at, end)
        if field.most == 1:
            if field.name in message:
                raise ValueError(f"{what} has {field.name} once more at byte {began}")
            message[field.name] = value
            continue
        found: list[Any] = message[field.name]
        found.extend(value) if field.kind == "ints" else found.append(value)
        if len(found) > field.most:
            raise ValueError(f"{what} has more than {field.most} {field.name} at byte {began}")
    return message


def _value(data: bytes, field: Field, wire: int, at: int, end: int) -> tuple[Any, int]:
    """The value that begins at a byte, and the byte after it."""
    name, kind, most = field
    if kind == "ints" and wire == VARINT:
        value, at = _varint(data, at, end)
        return [_signed(value)], at
    expected = WIRE_TYPES.get(kind, LENGTH) if isinstance(kind, str) else LENGTH
    if wire != expected:
        raise ValueError(f"{name} at byte {at} has wire type {wire}, expected {expected}")
    if kind == "int":
        value, at = _varint(data, at, end)
        return _signed(value), at
    length, at = (4, at) if kind == "float" else _varint(data, at, end)
    stop = at + length
    if stop > end:
        raise ValueError(f"{name} ends at byte {stop}, but what it is in at {end}")
    if not isinstance(kind, str):
        return decode(data, kind, name, at, stop), stop
    if kind == "float":
        return struct.unpack_from("<f", data, at)[0], stop
    if kind == "ints":
        return _integers(data, name, at, stop, most), stop
    return (_text(data[at:stop], name, at) if kind == "text" else data[at:stop]), stop


def _integers(data: bytes, name: str, at: int, end: int, most: int) -> list[int]:
    found = []
    while at < end:
        value, at = _varint(data, at, end)
        found.append(_signed(value))
        if len(found) > most:
            raise ValueError(f"{name} has more than {most} values at byte {at}")
    return found


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An integer of 64 bits without sign, and the byte after it."""
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    value = 0
    for index in range(at, min(end, at + MAX_VARINT_NBYTES)):
        byte = data[index]
        value |= (byte & 0x7F) << 7 * (index - at)
        if byte < 0x80:
            if value >> 64:
                raise ValueError(f"an integer at byte {at} has more than 64 bits")
            return value, index + 1
    raise ValueError(f"an integer at byte {at} does not end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _text(data: bytes, name: str, at: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} at byte {at} is not UTF-8") from error
