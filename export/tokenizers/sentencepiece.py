"""Conversion of a sentencepiece model to a `tokenizers` tokenizer with the same ids.

The stock converters differ from sentencepiece on most texts with unusual spaces or characters, so
normalizer, decoder and special tokens are built here.

Known differences that remain: a text that consists of one user-defined symbol gets no dummy prefix.
With NFKC rules, a text of deleted control characters alone gets none either; marks on letters of
another script or on compatibility characters may differ, as may U+FDD0, U+FDD1 and singleton marks
such as U+0340.
"""

import re
import unicodedata
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.pre_tokenizers import Split

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # piece types in sentencepiece_model.proto
_UNIGRAM, _BPE = 1, 2


def build_sentencepiece(library: Any, proto: Any, parts: dict[str, Any]) -> Tokenizer:
    """Build a tokenizer that gives the ids of sentencepiece.

    library: transformers.convert_slow_tokenizer; proto: the model's protobuf; parts: what the
    library's SentencePieceExtractor extracts. Raises ValueError for models that cannot be converted.
    """
    trainer, norm = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ValueError(f"model type {trainer.model_type}")
    if trainer.treat_whitespace_as_suffix or not norm.escape_whitespaces:
        raise ValueError("treat_whitespace_as_suffix or escape_whitespaces=false")
    hidden = {p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL, _BYTE)}
    merges = [pair for pair in parts.get("merges", ()) if "".join(pair) not in hidden]
    tokenizer: Tokenizer = library.SpmConverter.build_tokenizer_from_spm_proto(
        proto, parts["vocab"], merges
    )
    symbols = [p.piece for p in proto.pieces if p.type == _USER_DEFINED]
    normalizer = normalizers.Sequence(_sp_normalizer(norm, symbols))
    unstable = [name for name in symbols if normalizer.normalize_str(name) != name]
    if unstable:  # cannot be added, because text like its normalised form would match it
        raise ValueError(f"user-defined symbol {unstable[0]!r}, which normalisation changes")
    tokenizer.normalizer = normalizer
    if trainer.model_type == _UNIGRAM:
        visible = [p.piece for p in proto.pieces if p.piece not in hidden]
        tokenizer.pre_tokenizer = _keep_apart(hidden, "\n".join(visible))
    strip = [decoders.Strip(" ", 1, 0)] if norm.add_dummy_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    # Matched after normalisation, otherwise spaces beside a symbol would count as ends of the text.
    tokenizer.add_tokens([AddedToken(name, normalized=True) for name in symbols])
    return tokenizer


def _sp_normalizer(norm: Any, symbols: list[str]) -> list[Any]:
    steps = _charsmap(norm)
    if norm.remove_extra_whitespaces:
        # Only U+0020, and "▁" at the end; not by Strip, because that removes any white space.
        steps.append(normalizers.Replace(Regex(r"\A +|(?<= ) +|[ ▁]+\z"), ""))
    steps.append(normalizers.Replace(" ", "▁"))
    if norm.add_dummy_prefix and symbols:
        # Symbols are normalised themselves before they are searched for; they must get no prefix.
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{alone})\z)(?=(?m:.))"), "▁"))
    elif norm.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return steps


def _charsmap(norm: Any) -> list[Any]:
    """Return steps that replace characters as sentencepiece does, which takes the longest match.

    Precompiled replaces a whole grapheme by what its first match becomes, and so loses the accent of
    "①́" and the voice of "ｶﾞ". So each character goes to it alone (U+FDD0 between), and NFC composes
    after. U+FDD1 keeps NFC from reordering marks that never compose.
    """
    if not norm.precompiled_charsmap:
        return []
    mapped = normalizers.Precompiled(norm.precompiled_charsmap)
    if "nfkc" not in norm.name:
        return [mapped]
    return [
        normalizers.Replace(Regex(_never_composed()), "\ufdd1"),
        normalizers.Replace(Regex(r"(?m)(?<=.)(?=.)"), "\ufdd0"),
        mapped,
        normalizers.Replace("\ufdd0", ""),
        normalizers.NFC(),
        normalizers.Replace("\ufdd1", ""),
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


def _keep_apart(hidden: set[str], visible: str) -> Any:
    """Cut names such as "<0x41>" in ordinary text, at a place that no ordinary piece spans.

    Otherwise the unigram model would take the name for the piece itself.
    """
    cuts = []
    for name in sorted(hidden):
        at = next((k for k in range(1, len(name)) if name[k - 1 : k + 1] not in visible), None)
        if at:
            cuts.append(f"{re.escape(name[:at])}(?={re.escape(name[at:])})")
    return Split(Regex("|".join(cuts)), "merged_with_previous") if cuts else None
