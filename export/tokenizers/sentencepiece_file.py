"""Reader of sentencepiece's model files, which are messages of protocol buffers.

Not by the classes that sentencepiece brings, because they refuse every release of protobuf older
than the one they were generated with, and other packages may need an older one.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from typing import Any, NamedTuple

VARINT, LENGTH = 0, 2
FIXED = {1: 8, 5: 4}  # wire type -> bytes


class ModelType(IntEnum):
    """Kinds of models that can be converted, as sentencepiece_model.proto numbers them."""

    UNIGRAM = 1
    BPE = 2


class PieceType(IntEnum):
    """Kinds of pieces, as sentencepiece_model.proto numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """Token; its id is its place in the model."""

    name: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model file says about splitting a text; the names are those of its fields."""

    pieces: tuple[Piece, ...]
    type: int
    treat_whitespace_as_suffix: bool
    byte_fallback: bool
    rules: str  # name of the rules that normalise a text
    charsmap: bytes  # which holds them
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    def names(self, *types: PieceType) -> list[str]:
        """Names of all pieces of these types."""
        return [piece.name for piece in self.pieces if piece.type in types]


def read_model(data: bytes) -> SentencePieceModel:
    """Read a model. Raises ValueError, IndexError and the like for what sentencepiece refuses."""
    parts = _fields(data)
    # Of a message that is there in parts, the fields count together, as in the joined bytes.
    trainer, normalizer = (_fields(b"".join(parts[number])) for number in (2, 3))
    return SentencePieceModel(
        pieces=tuple(_piece(_fields(piece)) for piece in parts[1]),
        type=_last(trainer[3], ModelType.UNIGRAM),
        treat_whitespace_as_suffix=bool(_last(trainer[24], False)),
        byte_fallback=bool(_last(trainer[35], False)),
        rules=_last(normalizer[1], b"").decode(),
        charsmap=_last(normalizer[2], b""),
        add_dummy_prefix=bool(_last(normalizer[3], True)),
        remove_extra_whitespaces=bool(_last(normalizer[4], True)),
        escape_whitespaces=bool(_last(normalizer[5], True)),
    )


def _piece(fields: defaultdict[int, list[Any]]) -> Piece:
    (score,) = struct.unpack("<f", _last(fields[2], bytes(4)))
    return Piece(_last(fields[1], b"").decode(), score, PieceType(_last(fields[3], 1)))


def _last(values: Sequence[Any], default: Any) -> Any:
    """Return the value that counts, where a field is there several times or not at all."""
    return values[-1] if values else default


def _fields(message: bytes) -> defaultdict[int, list[Any]]:
    """Map number -> values of a message's fields: numbers, or bytes of all that is no varint."""
    stream, fields = BytesIO(message), defaultdict[int, list[Any]](list)
    while stream.tell() < len(message):
        number, wire = divmod(_varint(stream), 8)
        if wire == VARINT:
            fields[number].append(_varint(stream))
        elif wire == LENGTH or wire in FIXED:
            fields[number].append(stream.read(FIXED.get(wire) or _varint(stream)))
        else:
            raise ValueError(f"the field {number} has the wire type {wire}")
    return fields


def _varint(stream: BytesIO) -> int:
    value = shift = 0
    while (byte := stream.read(1)[0]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value | byte << shift
