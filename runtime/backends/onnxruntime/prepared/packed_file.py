"""Packed forms of matrices in a graph that onnxruntime saved with them.

The external_data of a tensor (onnx.proto) says where its packed form is, under the key "prepacked_0":
key|offset;length;checksum|..., in decimal numbers. onnxruntime documents this nowhere, so any other
text raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stem_edge.graph.encoder import FIXED32, LENGTH, PACKED, VARINT

FIXED64 = 1  # wire type of protobuf that the encoder lacks
# Fields of onnx.proto.
GRAPH, INITIALIZER, NAME, EXTERNAL_DATA, KEY, VALUE = 7, 5, 8, 13, 1, 2
PLACE = re.compile(rb"\|(\d+);(\d+);\d+")
FORM = re.compile(rb"[^|]*(\|\d+;\d+;\d+)+")


def packed_forms(graph: Path) -> dict[str, str]:
    """Return tensor -> text that says where its packed form is. Raises ValueError, OSError."""
    found = {}
    for message in _values(graph.read_bytes(), GRAPH):
        for tensor in _values(message, INITIALIZER):
            for entry in _values(tensor, EXTERNAL_DATA):
                (key,), (text,) = _values(entry, KEY), _values(entry, VALUE)
                if key == PACKED.encode():
                    if not FORM.fullmatch(text):
                        raise ValueError(f"packed form {text!r}")
                    (name,) = _values(tensor, NAME)
                    found[name.decode()] = text.decode()
    return found


def packed_places(graph: Path) -> list[tuple[int, int]]:
    """Return offset and bytes of each packed piece of a graph that `Packer` wrote, in the order of use.

    Raises OSError.
    """
    return [(int(one[1]), int(one[2])) for one in PLACE.finditer(graph.read_bytes())]


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
    """Return the varint at an offset, and the offset after it."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        if message[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
