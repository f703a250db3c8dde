"""Packed forms of matrices in a graph that onnxruntime saved with them.

Their places are text in the external_data of a tensor (onnx.proto), under the key "prepacked_0":
key|offset;length;checksum|..., in decimal numbers. That is nowhere documented, so another text
raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stem_edge.graph.encoder import FIXED32, LENGTH, PACKED, VARINT

FIXED64 = 1  # wire type of protobuf that the encoder lacks
# Fields of onnx.proto.
GRAPH, INITIALIZER, NAME, EXTERNAL_DATA, KEY, VALUE = 7, 5, 8, 13, 1, 2
NODE, INPUT = 1, 1
PLACE = re.compile(rb"\|(\d+);\d+;\d+")


class PackedForm(NamedTuple):
    """Packed form of a matrix, in one or several pieces."""

    key: str  # of the operator and the contents, made by onnxruntime
    places: list[tuple[int, int, int]]  # offset in the file of weights, bytes, checksum


def packed_forms(graph: Path) -> dict[str, PackedForm]:
    """Return the packed forms in a saved graph by the tensors' names. Raises ValueError, OSError."""
    found = {}
    for message in _values(graph.read_bytes(), GRAPH):
        for tensor in _values(message, INITIALIZER):
            for entry in _values(tensor, EXTERNAL_DATA):
                (key,), (text,) = _values(entry, KEY), _values(entry, VALUE)
                if key == PACKED.encode():
                    (name,) = _values(tensor, NAME)
                    found[name.decode()] = _packed_form(text.decode())
    return found


def places_in_use(graph: Path) -> Iterator[tuple[int, int]]:
    """Yield offset and bytes of each packed piece in the order in which a step of a saved graph reads them.

    Raises ValueError, OSError.
    """
    forms = packed_forms(graph)
    for message in _values(graph.read_bytes(), GRAPH):
        for name in (name for node in _values(message, NODE) for name in _values(node, INPUT)):
            if (form := forms.pop(name.decode(), None)) is not None:
                yield from ((offset, nbytes) for offset, nbytes, _ in form.places)


def plain_nbytes(graph: Path) -> int:
    """Return the bytes before the first packed piece in the file of weights of a saved graph; 0 without one."""
    return min((int(place[1]) for place in PLACE.finditer(graph.read_bytes())), default=0)


def _packed_form(text: str) -> PackedForm:
    key, *places = text.split("|")
    numbers = [tuple(map(int, place.split(";"))) for place in places]
    return PackedForm(key, [(offset, nbytes, checksum) for offset, nbytes, checksum in numbers])


def _values(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a field with lengths."""
    return (value for tag, value in _fields(message) if tag == number << 3 | LENGTH)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and value of each field of a message."""
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        nbytes = {FIXED64: 8, FIXED32: 4}.get(tag & 7, 0)
        if tag & 7 in (VARINT, LENGTH):
            number, at = _number(message, at)
            nbytes = number if tag & 7 == LENGTH else 0
        yield tag, message[at : at + nbytes]
        at += nbytes


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        if message[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
