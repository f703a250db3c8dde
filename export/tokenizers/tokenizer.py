"""Conversion of the trainer's tokenizer, whatever its kind, to one Hugging Face `tokenizer.json`.

A token's id chooses its row, so the converted tokenizer must give the trainer's own ids. Where the
public converters do not, this module corrects them, and the tests compare with the original.

Names of special tokens are recognised in a prompt, as Hugging Face users expect; the trainer reads
them as ordinary text. `Tokenizer.encode_special_tokens = True` gives the trainer's reading.

One difference remains: tiktoken text of more than 400,000 characters, which the trainer cuts into
pieces first. Those of sentencepiece are in sentencepiece.py.
"""

import base64
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from tokenizers.pre_tokenizers import ByteLevel

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tokenizers.sentencepiece import build_sentencepiece

_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"
_HINT = "give the right file, or pass --tokenizer FILE"
_PATTERN = (  # the trainer's, which cuts text before bytes are merged
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = {0: _BOS, 1: _EOS, 2: "<|fim_prefix|>", 3: "<|fim_middle|>"}
_NAMED |= {253: "<|fim_end_fill|>", 254: "<|fim_pad|>", 255: "<|fim_suffix|>"}


@dataclass(frozen=True)
class ExportedTokenizer:
    """Texts of tokenizer.json and tokenizer_config.json, and the ids that the model needs."""

    json: str
    config: dict[str, object]
    vocab_size: int  # 1 + the greatest id
    bos_id: int | None
    eos_ids: tuple[int, ...]


def convert_tokenizer(kind: str, path: Path | None, *, add_bos: bool | None) -> ExportedTokenizer:
    """Convert the trainer's tokenizer of this kind from the file `path` (unused for "bytes").

    add_bos: put the first token before a text. None: as the tokenizer.json does.
    """
    if kind == "json":
        return _convert_json(_file(kind, path), add_bos)
    if kind == "bytes":
        return _finish(Path("bytes"), _bytes().to_str(), _BOS, _EOS, bool(add_bos))
    converters = {"tiktoken": _convert_tiktoken, "sp": _convert_sp}
    if kind not in converters:
        raise CheckpointError(
            f"tokenizer kind {kind!r} is unknown; expected one of bytes, {', '.join(converters)}, json: "
            "correct the name, or pass --tokenizer tokenizer.json"
        )
    return converters[kind](_file(kind, path), bool(add_bos))


def _file(kind: str, path: Path | None) -> Path:
    if path is None:
        raise CheckpointError(f"tokenizer {kind!r} needs the path of a file, but has none; {_HINT}")
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent}: no {path.name}; add one or pass --tokenizer FILE (a tokenizer.json)"
        )
    return path


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever a damaged file makes a library raise into one CheckpointError."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # since a panic in Rust code is not an Exception
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{path}: {found}; expected {expected}; {_HINT}") from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"this tokenizer needs {name}, which cannot be imported ({error}); "
            "pip install 'stem-edge[export]', or pass --tokenizer tokenizer.json"
        ) from error


def _finish(
    path: Path, text: str, bos: str | None, eos: str | None, add_bos: bool, template: object = None
) -> ExportedTokenizer:
    with _reading(path, "a tokenizer that the tokenizers library can load and run"):
        tokenizer = _load(text)
        bos_id, eos_id = (_special_id(tokenizer, name) for name in (bos, eos))
        if add_bos and bos is None:
            raise ValueError("add_bos, but no bos_token in it or in tokenizer_config.json")
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
    # The size of padding is not checked by the library, so a large one would end the process.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = None
    tokenizer.decode(tokenizer.encode("a b").ids)  # needed, because some damage shows only in use
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
    # Byte-level instead of byte fallback, which decodes a whole run of bytes to U+FFFD when a
    # single one of them is wrong.
    alphabet = sorted(ByteLevel.alphabet())
    # A byte is its own character where the alphabet has it; the others follow in order.
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
        # Not by tiktoken's own reader, because its cache by path may return an older file.
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
        text = build_sentencepiece(library, extractor.proto, extractor.extract(None)).to_str()
        ids = (model.bos_id(), model.eos_id())  # -1 where the model has none
        bos, eos = (model.id_to_piece(i) if i >= 0 else None for i in ids)
    return _finish(path, text, bos, eos, add_bos)


def _convert_json(path: Path, add_bos: bool | None) -> ExportedTokenizer:
    with _reading(path, "a tokenizer.json of the tokenizers library"):
        text = path.read_text("utf-8")
    beside = path.with_name("tokenizer_config.json")
    config = _read_object(beside)
    template, jinja = config.get("chat_template"), path.with_name("chat_template.jinja")
    if jinja.is_file():
        with _reading(jinja, "a chat template in UTF-8"):
            template = jinja.read_text("utf-8")
    bos, eos = (_token_name(beside, config, key) for key in ("bos_token", "eos_token"))
    # add_bos_token is not read, since transformers, too, goes by the tokenizer.json alone.
    adds = _adds(path, text, bos) if add_bos is None else add_bos
    exported = _finish(path, text, bos, eos, adds, template)
    stops = [*exported.eos_ids, *_stops(path, exported.vocab_size)]
    return replace(exported, eos_ids=tuple(dict.fromkeys(stops)))


def _read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    with _reading(path, "a JSON object"):
        return dict(json.loads(path.read_text("utf-8")))


def _adds(path: Path, text: str, bos: str | None) -> bool:
    """Return whether the tokenizer itself puts its first token before a text."""
    with _reading(path, "a tokenizer that puts nothing or its bos_token before a text"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.encode("a")
        pairs = zip(added.tokens, added.special_tokens_mask, strict=True)
        own = [token for token, _ in takewhile(lambda pair: pair[1], pairs)]
        if own not in ([], [bos]):
            raise ValueError(f"it puts {own} before a text, but the bos_token is {bos!r}")
        return bool(own)


def _stops(path: Path, vocab_size: int) -> list[int]:
    """Read the ids that end a text from the model's files beside its tokenizer.json."""
    for beside in (path.with_name("generation_config.json"), path.with_name("config.json")):
        options = _read_object(beside)
        inside = options.get("text_config")  # of a multimodal model
        found = options.get("eos_token_id")
        if found is None and isinstance(inside, dict):
            found = inside.get("eos_token_id")
        if found is None:
            continue
        stops = found if isinstance(found, list) else [found]
        if not all(type(stop) is int and 0 <= stop < vocab_size for stop in stops):
            raise CheckpointError(
                f"{beside}: eos_token_id is {one_line(repr(found))}; expected ids below {vocab_size}, "
                f"as the tokenizer has; {_HINT}"
            )
        return stops
    return []


def _token_name(path: Path, config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"{path}: {key} is {one_line(repr(value))}; expected a name; {_HINT}")
    return name
