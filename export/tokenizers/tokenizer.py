"""Converts a trainer's tokenizer of any kind to a Hugging Face `tokenizer.json`.

A token's id selects its table row, so the converted tokenizer must return the trainer's own ids.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line, read_json
from stem_edge.export.tokenizers.gguf import read_gguf_tokenizer
from stem_edge.files import disk
from stem_edge.system.memory import return_freed_memory
from stem_edge.text.chat_template import MAX_CONFIG_NBYTES
from stem_edge.text.tokenizer_gate import MAX_NBYTES, check_json

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"  # of the tokenizer "bytes"
SAMPLE = "The 12 caf\u00e9s of \u65e5\u672c:\n\tx == 0 \U0001f600"  # encoded as a test, because some damage shows only in use
_HINT = "give the right file, or pass --tokenizer FILE"


@dataclass(frozen=True)
class ExportedTokenizer:
    """Contents of tokenizer.json and tokenizer_config.json, and ids of special tokens."""

    json: str
    config: dict[str, object]
    vocab_size: int  # 1 + the greatest id
    bos_id: int | None
    eos_ids: tuple[int, ...]


def convert_tokenizer(kind: str, path: Path | None, *, add_bos: bool | None) -> ExportedTokenizer:
    """Convert a tokenizer of the kind "json", "gguf" or "bytes". Raises CheckpointError.

    path: the tokenizer's file; None for "bytes". add_bos: put BOS before each text; None: as in the file.
    """
    if kind == "json":
        return _convert_json(_file(kind, path), add_bos)
    if kind == "gguf":
        file = _file(kind, path)
        with _reading(file, "a tokenizer as llama.cpp reads it"):
            tokenizer, said, ends = read_gguf_tokenizer(file)
        return_freed_memory()  # frees the reader's lists, because _finish needs as much memory
        return replace(_finish(file, tokenizer, *said), eos_ids=ends)
    if kind == "bytes":
        return _finish(Path("bytes"), _of_bytes(), BOS, EOS, bool(add_bos))
    raise CheckpointError(
        f"tokenizer kind {kind!r} is not read; expected one of bytes, json, gguf: pass "
        "--tokenizer tokenizer.json, as the save_pretrained of a tokenizer of transformers writes it"
    )


def _of_bytes() -> Tokenizer:
    # Byte-level instead of byte fallback, which decodes a whole run of bytes to U+FFFD when a
    # single one of them is wrong.
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (BOS, EOS)])
    return tokenizer


def _byte_chars() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char): char for char in alphabet if ord(char) < 256}
    others = iter(char for char in alphabet if ord(char) >= 256)
    return [own.get(byte) or next(others) for byte in range(256)]


def _file(kind: str, path: Path | None) -> Path:
    if path is None:
        raise CheckpointError(f"tokenizer {kind!r} needs the path of a file, but has none; {_HINT}")
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; copy the model's tokenizer.json there, or pass its path as --tokenizer FILE"
        )
    return path


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Convert any error in the `with` block to a CheckpointError that says what was `expected`."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust code is not an Exception
        found = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{path}: {found}; expected {expected}; {_HINT}") from error


def _finish(
    path: Path,
    tokenizer: Tokenizer,
    bos: str | None,
    eos: str | None,
    add_bos: bool,
    template: object = None,
) -> ExportedTokenizer:
    with _reading(path, "a tokenizer that the tokenizers library can load and run"):
        bos_id, eos_id = (_special_id(tokenizer, name) for name in (bos, eos))
        if add_bos and bos is None:
            raise ValueError("add_bos, but no bos_token in it or in tokenizer_config.json")
        tokenizer.post_processor = None
        if add_bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
            )
        check_json(tokenizer.to_str().encode())
        return_freed_memory()
        tokenizer.decode(tokenizer.encode(SAMPLE).ids)
        text = tokenizer.to_str()  # created again, to save its memory during the check
    config: dict[str, object] = {"bos_token": bos, "eos_token": eos}
    config |= {"add_bos_token": add_bos, "add_eos_token": False}
    config |= {} if template is None else {"chat_template": template}
    eos_ids = () if eos_id is None else (eos_id,)
    vocab_size = 1 + max(tokenizer.get_vocab().values())
    return ExportedTokenizer(text, config, vocab_size, bos_id, eos_ids)


def _special_id(tokenizer: Tokenizer, name: str | None) -> int | None:
    found = None if name is None else tokenizer.token_to_id(name)
    if name is not None and found is None:
        raise ValueError(f"special token {name!r} is not in the vocabulary")
    return found


def _convert_json(path: Path, add_bos: bool | None) -> ExportedTokenizer:
    with _reading(path, "a tokenizer.json of the tokenizers library"):
        # Checked first, because the library does not check numbers.
        checked = check_json(disk.read_file(path.resolve(), MAX_NBYTES))
        tokenizer = Tokenizer.from_buffer(checked.json)
    beside = path.with_name("tokenizer_config.json")
    config = _read_object(beside)
    template, jinja = config.get("chat_template"), path.with_name("chat_template.jinja")
    if jinja.is_file():
        with _reading(jinja, "a chat template in UTF-8"):
            template = disk.read_file(jinja.resolve(), MAX_CONFIG_NBYTES).decode()
            if len(template) > MAX_CONFIG_NBYTES:
                raise ValueError(f"more than {MAX_CONFIG_NBYTES:,} bytes")
    bos, eos = (_token_name(beside, config, key) for key in ("bos_token", "eos_token"))
    # add_bos_token is not read, since transformers, too, goes by the tokenizer.json alone.
    adds = _adds(path, tokenizer, bos) if add_bos is None else add_bos
    exported = _finish(path, tokenizer, bos, eos, adds, template)
    stops = [*exported.eos_ids, *_stops(path, exported.vocab_size)]
    return replace(exported, eos_ids=tuple(dict.fromkeys(stops)))


def _read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; return {} if there is no file."""
    return read_json(path, "a JSON object", dict[str, Any]) if path.is_file() else {}


def _adds(path: Path, tokenizer: Tokenizer, bos: str | None) -> bool:
    """Return True if the tokenizer puts `bos` before text; other tokens raise CheckpointError."""
    with _reading(path, "a tokenizer that puts nothing or its bos_token before a text"):
        added = tokenizer.encode("a")
        pairs = zip(added.tokens, added.special_tokens_mask, strict=True)
        own = [token for token, _ in takewhile(lambda pair: pair[1], pairs)]
        if own not in ([], [bos]):
            raise ValueError(f"it puts {own} before a text, but the bos_token is {bos!r}")
        return bool(own)


def _stops(path: Path, vocab_size: int) -> list[int]:
    """Read the ids that end a text (eos_token_id) from the files beside tokenizer.json."""
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
