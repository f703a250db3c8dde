"""Conversion of a sentencepiece model to a `tokenizers` tokenizer with the same ids.

The stock converters differ from sentencepiece on most texts with unusual spaces or characters, so
normalizer, decoder and special tokens are built here.

Known differences that remain: a text that consists of one user-defined symbol gets no dummy prefix.
With NFKC rules, a text of deleted control characters alone gets none either; marks on letters of
another script or on compatibility characters may differ, as may U+0378, U+0379 and singleton marks
such as U+0340.

Model files are read as messages of protocol buffers, not by the classes that sentencepiece brings: these
refuse every release of protobuf older than theirs, and other packages may need an older one.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stem_edge.export.tokenizers.comparison import Conversion, import_original
from stem_edge.export.tokenizers.gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from stem_edge.export.tokenizers.ranks import merges

UNIGRAM, BPE = 1, 2  # kinds of models; those of pieces have the numbers of GGUF
VARINT, LENGTH = 0, 2
FIXED = {1: 8, 5: 4}  # wire type -> bytes


class Piece(NamedTuple):
    """Token; its id is its place in the model."""

    name: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model file says about splitting a text; attributes are named like its fields."""

    pieces: tuple[Piece, ...]
    type: int
    treat_whitespace_as_suffix: bool
    byte_fallback: bool
    rules: str  # name of the rules that normalise a text
    charsmap: bytes  # which holds them
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    def names(self, *types: int) -> list[str]:
        """Names of all pieces of these types."""
        return [piece.name for piece in self.pieces if piece.type in types]


def read_model(data: bytes) -> SentencePieceModel:
    """Read a model. Raises ValueError, IndexError and the like for what sentencepiece refuses."""
    parts = _fields(data)
    # Of a message that is there in parts, the fields count together, as in the joined bytes.
    trainer, normalizer = (_fields(b"".join(parts[number])) for number in (2, 3))
    return SentencePieceModel(
        pieces=tuple(_piece(_fields(piece)) for piece in parts[1]),
        type=_last(trainer[3], UNIGRAM),
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
    return Piece(_last(fields[1], b"").decode(), score, _last(fields[3], NORMAL))


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


def convert_sentencepiece(path: Path) -> Conversion:
    """Convert a BPE or unigram model.

    Raises CheckpointError without the package sentencepiece, ValueError for models that cannot be
    converted, and what sentencepiece raises for damaged ones.
    """
    library, data = import_original("sentencepiece"), path.read_bytes()
    original = library.SentencePieceProcessor(model_proto=data)
    ids = (original.bos_id(), original.eos_id())  # -1 where the model has none
    bos, eos = (original.id_to_piece(i) if i >= 0 else None for i in ids)
    return Conversion(_tokenizer(read_model(data)), original.encode, bos, eos)


def _tokenizer(model: SentencePieceModel) -> Tokenizer:
    if model.treat_whitespace_as_suffix or not model.escape_whitespaces:
        raise ValueError("treat_whitespace_as_suffix or escape_whitespaces=false")
    if unused := model.names(UNUSED):
        raise ValueError(f"{len(unused)} unused pieces, such as {unused[0]!r}")
    symbols = model.names(USER_DEFINED)
    normalizer = normalizers.Sequence(_normalizer(model, symbols))
    unstable = [name for name in symbols if normalizer.normalize_str(name) != name]
    if unstable:  # cannot be added, because text like its normalised form would match it
        raise ValueError(f"user-defined symbol {unstable[0]!r}, which normalisation changes")
    tokenizer = Tokenizer(_model(model))
    tokenizer.normalizer = normalizer
    if model.type == UNIGRAM:
        hidden = model.names(UNKNOWN, CONTROL, BYTE)
        visible = "\n".join(model.names(NORMAL, USER_DEFINED))
        tokenizer.pre_tokenizer = _keep_apart(hidden, visible)
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    special = model.names(UNKNOWN, CONTROL)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    # Matched after normalisation, otherwise spaces beside a symbol would count as ends of the text.
    tokenizer.add_tokens([AddedToken(name, normalized=True) for name in symbols])
    return tokenizer


def _model(model: SentencePieceModel) -> models.Model:
    (unknown,) = model.names(UNKNOWN)
    ids = {piece.name: number for number, piece in enumerate(model.pieces)}
    if model.type == UNIGRAM:
        scores = [(piece.name, piece.score) for piece in model.pieces]
        return models.Unigram(scores, ids[unknown], model.byte_fallback)
    if model.type != BPE:
        raise ValueError(f"model type {model.type}")
    # Others are never made by merging: symbols are split off a text before.
    normal = {piece.name: piece.score for piece in model.pieces if piece.type == NORMAL}
    ranked = sorted(normal, key=normal.__getitem__, reverse=True)
    return models.BPE(
        ids,
        merges(ranked, normal),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _normalizer(model: SentencePieceModel, symbols: list[str]) -> list[normalizers.Normalizer]:
    steps = _charsmap(model)
    if model.remove_extra_whitespaces:
        # Only U+0020, and "▁" at the end; not by Strip, because that removes any white space.
        steps.append(normalizers.Replace(Regex(r"\A +|(?<= ) +|[ ▁]+\z"), ""))
    if model.add_dummy_prefix and symbols:
        # Symbols are normalised themselves before they are searched for; they must get no prefix.
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{alone})\z)(?=(?m:.))"), " "))
    steps.append(normalizers.Replace(" ", "▁"))
    if model.add_dummy_prefix and not symbols:
        steps.append(normalizers.Prepend("▁"))
    return steps


def _charsmap(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    """Return steps that replace characters as sentencepiece does, which takes the longest match.

    Precompiled replaces a whole grapheme by what its first match becomes, and so loses the accent of
    "①́" and the voice of "ｶﾞ". So each character goes to it alone (U+0378 between), and NFC composes
    after. U+0379 keeps NFC from reordering marks that never compose. Both are unassigned, and short:
    a load refuses steps that could make a text too long (text/tokenizer_steps.py).
    """
    if not model.charsmap:
        return []
    mapped = normalizers.Precompiled(model.charsmap)
    if "nfkc" not in model.rules:
        return [mapped]
    return [
        normalizers.Replace(Regex(_never_composed()), "\u0379"),
        normalizers.Replace(Regex(r"(?m)(?<=.)(?=.)"), "\u0378"),
        mapped,
        normalizers.Replace("\u0378", ""),
        normalizers.NFC(),
        normalizers.Replace("\u0379", ""),
    ]


def _never_composed() -> str:
    """Return a pattern of positions where NFC composes or reorders a mark, but sentencepiece does
    not, because its rules start with a bare letter and hold their marks in canonical order."""
    canonical = (c for c in map(chr, range(0x110000)) if unicodedata.decomposition(c)[:1].isalnum())
    letters = [c for c in canonical if unicodedata.normalize("NFC", c) == c]
    marks = sorted({unicodedata.normalize("NFD", c)[-1] for c in letters})
    order = {m: unicodedata.combining(m) for m in marks}
    either = f"[{''.join(marks)}]"
    places = [f"(?!{either})", rf"(?<=\p{{M}})(?<!{either})", f"(?<=[{''.join(letters)}])"]
    for rank in sorted(set(order.values()) - {0, max(order.values())}):
        later = "".join(m for m in marks if order[m] > rank)
        same = "".join(m for m in marks if order[m] == rank)
        places.append(f"(?<=[{later}])(?=[{same}])")
    return rf"(?m)(?<=.)(?=\p{{M}})(?:{'|'.join(places)})"


def _keep_apart(hidden: list[str], visible: str) -> pre_tokenizers.Split | None:
    """Cut names such as "<0x41>" in ordinary text, at a place that no ordinary piece spans.

    Otherwise the unigram model would take the name for the piece itself.
    """
    cuts = []
    for name in sorted(hidden):
        at = next((k for k in range(1, len(name)) if name[k - 1 : k + 1] not in visible), None)
        if at:
            cuts.append(f"{re.escape(name[:at])}(?={re.escape(name[at:])})")
    return pre_tokenizers.Split(Regex("|".join(cuts)), "merged_with_previous") if cuts else None
