"""The trainer's tokenizer, whatever its kind, as one Hugging Face `tokenizer.json`.

A token's id chooses its row, so the converted tokenizer must give the trainer's own ids. Where the
public converters do not, this module corrects them, and the tests compare with the original.

Names of special tokens are recognised in a prompt, as Hugging Face users expect; the trainer reads
them as ordinary text. `Tokenizer.encode_special_tokens = True` gives the trainer's reading.

Known differences that remain: tiktoken text of more than 400,000 characters, which the trainer cuts
into pieces first; a sentencepiece text that is nothing but one user-defined symbol, which gets no
dummy prefix; and with NFKC rules a text of deleted control characters alone (no dummy prefix), marks
that are stacked on letters of another script or on compatibility characters, U+FDD0 and U+FDD1.
"""

import base64
import importlib
import json
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Split

from stem_edge.errors import CheckpointError

_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"
_HINT = "give the right file, or convert it yourself and pass --tokenizer tokenizer.json"
_PATTERN = (  # the trainer's: how it cuts text before merging bytes
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = {0: _BOS, 1: _EOS, 2: "<|fim_prefix|>", 3: "<|fim_middle|>"}
_NAMED |= {253: "<|fim_end_fill|>", 254: "<|fim_pad|>", 255: "<|fim_suffix|>"}
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # piece types in sentencepiece_model.proto
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class ExportedTokenizer:
    json: str
    config: dict[str, object]
    vocab_size: int  # 1 + the greatest id
    bos_id: int | None
    eos_ids: tuple[int, ...]


def convert_tokenizer(kind: str, path: Path | None, *, add_bos: bool) -> ExportedTokenizer:
    """Convert the trainer's tokenizer `kind` kept at `path` (unused for "bytes")."""
    if kind == "bytes":
        return _finish(Path("bytes"), _bytes().to_str(), _BOS, _EOS, add_bos)
    converters = {"tiktoken": _convert_tiktoken, "sp": _convert_sp, "json": _convert_json}
    if kind not in converters:
        raise CheckpointError(
            f"tokenizer kind {kind!r} is unknown; expected one of bytes, {', '.join(converters)}; "
            "correct the name, or pass --tokenizer tokenizer.json"
        )
    if path is None:
        raise CheckpointError(f"tokenizer {kind!r} needs the path of its file, got none; {_HINT}")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected a {kind!r} tokenizer; {_HINT}")
    return converters[kind](path, add_bos)


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever a damaged file makes a library raise into one CheckpointError."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust code is not an Exception
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{path}: {found}; expected {expected}; {_HINT}") from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"this tokenizer needs {name}, which did not import ({error}); "
            "pip install 'stem-edge[export]', or pass --tokenizer tokenizer.json"
        ) from error


def _finish(
    path: Path, text: str, bos: str | None, eos: str | None, add_bos: bool, template: object = None
) -> ExportedTokenizer:
    with _reading(path, "a tokenizer that the tokenizers library can load and run"):
        tokenizer = _load(text)
        bos_id, eos_id = (_special_id(tokenizer, name) for name in (bos, eos))
        if add_bos and bos is None:
            raise ValueError("no bos_token (nor in a tokenizer_config.json beside it), but add_bos")
        if add_bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
            )
    config: dict[str, object] = {"bos_token": bos, "eos_token": eos}
    config |= {"add_bos_token": add_bos, "add_eos_token": False}
    config |= {} if template is None else {"chat_template": template}
    eos_ids = () if eos_id is None else (eos_id,)
    vocab_size = 1 + max(tokenizer.get_vocab().values())
    return ExportedTokenizer(tokenizer.to_str(), config, vocab_size, bos_id, eos_ids)


def _load(text: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(text)
    # A padding block's size is taken on trust: a great one ends the process at the first text.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = None
    tokenizer.decode(tokenizer.encode("a b").ids)  # some damage shows only in use
    ids = tokenizer.get_vocab().values()
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"{len(ids)} tokens with {len(set(ids))} different ids")
    return tokenizer


def _special_id(tokenizer: Tokenizer, name: str | None) -> int | None:
    found = None if name is None else tokenizer.token_to_id(name)
    if name is not None and found is None:
        raise ValueError(f"special token {name!r} is not in the vocabulary")
    return found


def _bytes() -> Tokenizer:
    # Byte-level, and not by byte fallback: that one decodes a whole run of bytes to U+FFFD when a
    # single one of them is wrong.
    alphabet = sorted(ByteLevel.alphabet())
    # Its first characters stand for the bytes of their own code, the others for the rest, in order.
    own = {ord(char): char for char in alphabet if ord(char) < 256}
    others = iter(char for char in alphabet if ord(char) >= 256)
    vocab = {own.get(byte) or next(others): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (_BOS, _EOS)])
    return tokenizer


def _convert_tiktoken(path: Path, add_bos: bool) -> ExportedTokenizer:
    library = _import("transformers.convert_slow_tokenizer")
    with _reading(path, "a tiktoken rank file: lines of base64 and rank"):
        ranks = _read_ranks(path)
        names = [_NAMED.get(i, f"<|reserved_special_token_{i}|>") for i in range(256)]
        converter = library.TikTokenConverter(pattern=_PATTERN, extra_special_tokens=names)
        # tiktoken's own reader caches by path in the temporary folder: it may give an older file.
        converter.load_tiktoken_bpe = lambda _: ranks
        text = converter.converted().to_str()
    return _finish(path, text, _BOS, _EOS, add_bos)


def _read_ranks(path: Path) -> dict[bytes, int]:
    pairs = [line.split() for line in path.read_bytes().splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if sorted(ranks.values()) != list(range(len(pairs))):
        raise ValueError(f"the ranks of {len(pairs)} lines are not 0 to {len(pairs) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{len(missing)} single bytes have no rank, the first is {missing[0]}")
    return ranks


def _convert_sp(path: Path, add_bos: bool) -> ExportedTokenizer:
    library, reader = _import("transformers.convert_slow_tokenizer"), _import("sentencepiece")
    with _reading(path, "a sentencepiece BPE or unigram model"):
        model = reader.SentencePieceProcessor(model_proto=path.read_bytes())
        extractor = library.SentencePieceExtractor(str(path))
        text = _build_sp(library, extractor.proto, extractor.extract(None)).to_str()
        ids = (model.bos_id(), model.eos_id())  # -1 where the model has none
        bos, eos = (model.id_to_piece(i) if i >= 0 else None for i in ids)
    return _finish(path, text, bos, eos, add_bos)


def _build_sp(library: Any, proto: Any, parts: dict[str, Any]) -> Tokenizer:
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
    if unstable:  # its changed form would be taken for it everywhere
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
    # Found after normalisation, or spaces beside a symbol would count as the ends of the text.
    tokenizer.add_tokens([AddedToken(name, normalized=True) for name in symbols])
    return tokenizer


def _sp_normalizer(norm: Any, symbols: list[str]) -> list[Any]:
    steps = _charsmap(norm)
    if norm.remove_extra_whitespaces:  # U+0020, and "▁" at the end; Strip would take every space
        steps.append(normalizers.Replace(Regex(r"\A +|(?<= ) +|[ ▁]+\z"), ""))
    steps.append(normalizers.Replace(" ", "▁"))
    if norm.add_dummy_prefix and symbols:
        # A symbol is itself normalised before it is searched for, and must not get the prefix.
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{alone})\z)(?=(?m:.))"), "▁"))
    elif norm.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return steps


def _charsmap(norm: Any) -> list[Any]:
    """Sentencepiece replaces the longest match; Precompiled replaces whole graphemes by the first.

    It loses the accent of "①́" and the voice of "ｶﾞ". So each character goes to it alone (U+FDD0
    between), and NFC composes after. U+FDD1 keeps NFC from reordering marks that never compose.
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
    """Where NFC composes or reorders a mark and sentencepiece, whose rules start with a bare letter
    and hold their marks in canonical order, does not: as a pattern of positions."""
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

    The unigram model would take the name for the piece itself.
    """
    cuts = []
    for name in sorted(hidden):
        at = next((k for k in range(1, len(name)) if name[k - 1 : k + 1] not in visible), None)
        if at:
            cuts.append(f"{re.escape(name[:at])}(?={re.escape(name[at:])})")
    return Split(Regex("|".join(cuts)), "merged_with_previous") if cuts else None


def _convert_json(path: Path, add_bos: bool) -> ExportedTokenizer:
    with _reading(path, "a tokenizer.json of the tokenizers library"):
        text = path.read_text("utf-8")
    config: dict[str, Any] = {}
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        with _reading(beside, "a JSON object"):
            config = dict(json.loads(beside.read_text("utf-8")))
    template, jinja = config.get("chat_template"), path.with_name("chat_template.jinja")
    if jinja.is_file():
        with _reading(jinja, "a chat template in UTF-8"):
            template = jinja.read_text("utf-8")
    bos, eos = (_token_name(beside, config, key) for key in ("bos_token", "eos_token"))
    return _finish(path, text, bos, eos, add_bos, template)


def _token_name(path: Path, config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"{path}: {key} is {value!r}; expected a name; {_HINT}")
    return name
