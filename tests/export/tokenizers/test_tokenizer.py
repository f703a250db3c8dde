"""Converted tokenizers, compared with the trainer's own library."""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from trained_tokenizers import TEXTS, train_ranks, write_ranks

from stem_edge.errors import CheckpointError
from stem_edge.export.tokenizers import ranks
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer, convert_tokenizer

# The trainer's cut, written down again: a slip in the module must not repeat itself here.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def as_trainer(exported: ExportedTokenizer) -> Callable[[str], list[int]]:
    """Encode with names of special tokens as ordinary text, as the trainer does."""
    tokenizer = Tokenizer.from_str(exported.json)
    tokenizer.encode_special_tokens = True
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def differing(exported: ExportedTokenizer, encode: Any, texts: list[str]) -> list[str]:
    ours = as_trainer(exported)
    return [text for text in texts if ours(text) != encode(text)]


def round_trip(exported: ExportedTokenizer, text: str) -> str:
    tokenizer = Tokenizer.from_str(exported.json)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@pytest.fixture(scope="module")
def ranks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranks(tmp_path_factory.mktemp("ranks") / "tokenizer.model", train_ranks(400))


def test_bytes() -> None:
    exported = convert_tokenizer("bytes", None, add_bos=True)
    assert (exported.vocab_size, exported.bos_id, exported.eos_ids) == (258, 256, (257,))
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    texts = TEXTS + names
    assert differing(exported, lambda text: list(text.encode()), texts) == []
    assert [text for text in texts if round_trip(exported, text) != text] == []


def test_tiktoken(ranks_file: Path) -> None:
    exported = convert_tokenizer("tiktoken", ranks_file, add_bos=True)
    assert (exported.vocab_size, exported.bos_id, exported.eos_ids) == (656, 400, (401,))
    original = tiktoken.Encoding(
        "test", pat_str=PATTERN, mergeable_ranks=train_ranks(400), special_tokens={}
    )
    texts = [*TEXTS, "a<|end_of_text|>b", "<|begin_of_text|>"]
    assert differing(exported, original.encode_ordinary, texts) == []
    assert [text for text in texts if round_trip(exported, text) != text] == []


def test_tiktoken_cuts_text_where_the_trainer_does(tmp_path: Path) -> None:
    # Every pair of bytes merges, so the ids of a text show where it was cut.
    rng = random.Random(3)
    tokens = [bytes([b]) for b in range(256)]
    tokens += rng.sample([bytes([a, b]) for a in range(256) for b in range(256)], 20_000)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    path = write_ranks(tmp_path / "pairs", ranks)
    original = tiktoken.Encoding("pairs", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    exported = convert_tokenizer("tiktoken", path, add_bos=False)
    assert differing(exported, original.encode_ordinary, TEXTS) == []


def test_tiktoken_special_tokens(ranks_file: Path) -> None:
    tokenizer = Tokenizer.from_str(convert_tokenizer("tiktoken", ranks_file, add_bos=True).json)
    names = {0: "begin_of_text", 1: "end_of_text", 2: "fim_prefix", 3: "fim_middle", 4: ""}
    names |= {252: "", 253: "fim_end_fill", 254: "fim_pad", 255: "fim_suffix"}
    for i, name in names.items():
        full = f"<|{name or f'reserved_special_token_{i}'}|>"
        assert tokenizer.token_to_id(full) == 400 + i
        assert tokenizer.decode([400 + i]) == ""
        assert tokenizer.decode([400 + i], skip_special_tokens=False) == full
    assert tokenizer.encode("<|end_of_text|>").ids == [400, 401]


@pytest.mark.parametrize("kind", ["bytes", "tiktoken"])
def test_bos_config_and_determinism(kind: str, ranks_file: Path) -> None:
    path = {"bytes": None, "tiktoken": ranks_file}[kind]
    exported = convert_tokenizer(kind, path, add_bos=True)
    assert exported == convert_tokenizer(kind, path, add_bos=True)
    tokenizer = Tokenizer.from_str(exported.json)
    assert tokenizer.encode("abc").ids[0] == exported.bos_id
    assert exported.config["add_bos_token"] is True and exported.config["add_eos_token"] is False
    assert tokenizer.token_to_id(str(exported.config["bos_token"])) == exported.bos_id
    assert (tokenizer.token_to_id(str(exported.config["eos_token"])),) == exported.eos_ids
    bare = Tokenizer.from_str(convert_tokenizer(kind, path, add_bos=False).json)
    assert bare.encode("abc").ids == tokenizer.encode("abc", add_special_tokens=False).ids


def write_json(folder: Path, config: dict[str, object] | None) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<x>": 1, "<y:z>": 7}, unk_token="a"))
    tokenizer.enable_padding(length=4)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def test_json_with_a_config_beside_it(tmp_path: Path) -> None:
    config: dict[str, object] = {"bos_token": "<x>", "eos_token": {"content": "<y:z>"}}
    path = write_json(tmp_path, config | {"chat_template": "{{ messages }}", "other": 1})
    exported = convert_tokenizer("json", path, add_bos=True)
    assert (exported.vocab_size, exported.bos_id, exported.eos_ids) == (8, 1, (7,))
    assert exported.config == {
        "bos_token": "<x>",
        "eos_token": "<y:z>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": "{{ messages }}",
    }
    assert Tokenizer.from_str(exported.json).encode("a").ids == [1, 0]  # not padded, not cut
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert convert_tokenizer("json", path, add_bos=True).config["chat_template"] == "newer"


BAD_MODEL = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})
NULL_MAP = json.dumps(  # because it makes the library panic
    {
        "version": "1.0",
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": None},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
)


@pytest.mark.parametrize(
    ("kind", "content", "found"),
    [
        ("tiktoken", b"", "256 single bytes have no rank"),
        ("tiktoken", b"IQ== 0\nIg==", "ValueError"), ("tiktoken", b"!! 0\n", "base64"),
        ("tiktoken", b"IQ== 1\n", "the ranks of 1 lines are not 0 to 0"),
        ("json", b"", "expected a tokenizer"), ("json", b"\xff\xfe", "UnicodeDecodeError"),
        ("json", b"{}", "expected a tokenizer"), ("json", BAD_MODEL.encode(), "vocab is empty"),
        ("json", NULL_MAP.encode(), "expected a tokenizer"),
    ],
)  # fmt: skip
def test_damaged_file(kind: str, content: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        convert_tokenizer(kind, path, add_bos=False)
    message = str(caught.value)
    assert found in message and str(path) in message and "--tokenizer FILE" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"bos_token": "<no>"}, "'<no>' is not in the vocabulary"),
        ({"bos_token": 3}, "bos_token is 3"),
        ({}, "no bos_token"),
    ],
)
def test_json_with_a_config_that_does_not_fit(
    config: dict[str, object], found: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=found):
        convert_tokenizer("json", write_json(tmp_path, config), add_bos=True)


def test_unknown_kind_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"bytes, tiktoken, json.*--tokenizer tokenizer.json"):
        convert_tokenizer("sp", None, add_bos=False)
    with pytest.raises(CheckpointError, match="no gone; add one or pass --tokenizer FILE"):
        convert_tokenizer("tiktoken", tmp_path / "gone", add_bos=False)
    with pytest.raises(CheckpointError, match="'tiktoken' needs the path of a file"):
        convert_tokenizer("tiktoken", None, add_bos=False)


@pytest.mark.slow
def test_tiktoken_of_any_characters(ranks_file: Path) -> None:
    original = tiktoken.Encoding(
        "", pat_str=PATTERN, mergeable_ranks=train_ranks(400), special_tokens={}
    )
    ours = as_trainer(convert_tokenizer("tiktoken", ranks_file, add_bos=False))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from([*TEXTS, " ", "  "]), st.text(max_size=6))))
    def check(pieces: list[str]) -> None:
        assert ours("".join(pieces)) == original.encode_ordinary("".join(pieces))

    check()


def test_a_conversion_with_other_ids_ends_the_export(
    ranks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the library changed."""
    monkeypatch.setattr(ranks, "merges", lambda *_: [])
    with pytest.raises(CheckpointError) as caught:
        convert_tokenizer("tiktoken", ranks_file, add_bos=True)
    words = r"reads '.+' after '.*' other than the original: expected ids \[\d.*\], found \[\d.*\]"
    assert re.search(words, str(caught.value)) and str(ranks_file) in str(caught.value)


def test_without_the_trainers_library(ranks_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(CheckpointError, match=r"needs tiktoken.*stem-edge\[export\]"):
        convert_tokenizer("tiktoken", ranks_file, add_bos=True)
