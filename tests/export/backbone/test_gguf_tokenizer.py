"""Tokenizers in GGUF: llama.cpp reads the keys and must find the same ids as the tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO
from llama_vocabulary import Encode, vocabularies
from tokenizers import Tokenizer
from trained_tokenizers import TEXTS, train_ranks, train_sp, write_ranks

from stem_edge.export.backbone.gguf_tokenizer import differences, tokenizer_metadata
from stem_edge.export.backbone.gguf_writer import encode_header
from stem_edge.export.tokenizers.gguf import GPT2, LLAMA3, QWEN2, SMOLLM
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer, convert_tokenizer

Opened = Callable[[ExportedTokenizer, int], Encode]
SPLIT: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
PRE_TOKENIZERS = {
    LLAMA3: [SPLIT | {"pattern": {"Regex": LLAMA3}}, LEVEL],
    QWEN2: [SPLIT | {"pattern": {"Regex": QWEN2}}, LEVEL],
    GPT2: [LEVEL | {"use_regex": True}],
    SMOLLM: [{"type": "Digits", "individual_digits": True}, LEVEL | {"use_regex": True}],
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Open the vocabulary of a file without tensors."""
    with vocabularies() as opened:

        def open_vocabulary(converted: ExportedTokenizer, vocab_size: int) -> Encode:
            path = tmp_path / f"{vocab_size}.gguf"
            values = {"general.architecture": "llama", **tokenizer_metadata(converted, vocab_size)}
            path.write_bytes(encode_header(values, []))
            found = opened(path)
            assert found.size == vocab_size
            return found.encode

        yield open_vocabulary


def check(converted: ExportedTokenizer, encode: Encode, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_str(converted.json)
    for add in (False, True):
        expected = [tokenizer.encode(text, add_special_tokens=add).ids for text in texts]
        found = [encode(text, add) for text in texts]
        assert [t for t, a, b in zip(texts, expected, found, strict=True) if a != b] == []


def with_special(converted: ExportedTokenizer) -> list[str]:
    names = [t["content"] for t in json.loads(converted.json)["added_tokens"]][:3]
    return [*TEXTS, *names, f"a{names[0]} b  c{names[1]}{names[1]}d", " ".join(names)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> ExportedTokenizer:
    """Every pair of bytes may merge, so the ids of a text show where it was cut."""
    rng = random.Random(3)
    tokens = [bytes([b]) for b in range(256)]
    tokens += rng.sample([bytes([a, b]) for a in range(256) for b in range(256)], 20_000)
    path = tmp_path_factory.mktemp("pairs") / "ranks"
    write_ranks(path, {token: rank for rank, token in enumerate(tokens)})
    return convert_tokenizer("tiktoken", path, add_bos=False)


def test_the_demo_models(opened: Opened) -> None:
    converted = convert_tokenizer("json", DEMO / "tokenizer.json", add_bos=None)
    assert differences(converted) == ()
    check(converted, opened(converted, converted.vocab_size), with_special(converted))


@pytest.mark.parametrize("kind", ["tiktoken", "bytes"])
def test_byte_level(kind: str, tmp_path: Path, opened: Opened) -> None:
    path = write_ranks(tmp_path / "ranks", train_ranks(400))
    converted = convert_tokenizer(kind, path, add_bos=True)
    assert differences(converted) == ()
    check(converted, opened(converted, converted.vocab_size + 7), with_special(converted))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("pattern", "pre"),
    [(LLAMA3, "llama-bpe"), (QWEN2, "qwen2"), (GPT2, "gpt-2"), (SMOLLM, "smollm")],
)
def test_patterns(
    pattern: str,
    pre: str,
    whole: bool,
    pairs: ExportedTokenizer,
    opened: Opened,
) -> None:
    parsed = json.loads(pairs.json)
    parsed["model"]["ignore_merges"] = whole
    parsed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pattern]}
    converted = replace(pairs, json=json.dumps(parsed))
    found = tokenizer_metadata(converted, converted.vocab_size)["tokenizer.ggml.pre"]
    if whole != (pattern == LLAMA3):
        assert found == ("dbrx" if pattern == LLAMA3 else "default")
        pre = str(found)
    assert found == pre
    if pre != "default":
        assert differences(converted) == ()
        check(converted, opened(converted, converted.vocab_size), TEXTS)
    else:
        assert "does not know the tokenizer's pattern" in differences(converted)[0]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path, opened: Opened) -> None:
    train_sp(
        tmp_path / "m",
        model_type="bpe",
        normalization_rule_name="identity",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
    )
    converted = convert_tokenizer("sp", tmp_path / "m", add_bos=True)
    assert differences(converted) == ()
    check(converted, opened(converted, converted.vocab_size + 3), with_special(converted))


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
def test_sentencepiece_as_transformers_writes_it(
    scheme: str, tmp_path: Path, opened: Opened
) -> None:
    train_sp(
        tmp_path / "m",
        model_type="bpe",
        normalization_rule_name="identity",
        byte_fallback=True,
        remove_extra_whitespaces=False,
    )
    converted = convert_tokenizer("sp", tmp_path / "m", add_bos=True)
    parsed = json.loads(converted.json)
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    parsed |= {"normalizer": None, "pre_tokenizer": spaces}
    converted = replace(converted, json=json.dumps(parsed))
    texts = with_special(converted)
    if scheme != "never":  # it puts no space where there is one or after "<s>", llama.cpp does
        assert "or treat spaces" in differences(converted)[0]
        texts = [text for text in TEXTS if not text.startswith((" ", "▁", "<s>"))]
    else:
        assert differences(converted) == ()
    check(converted, opened(converted, converted.vocab_size), texts)


def test_differences_from_llama_cpp_are_reported(tmp_path: Path, pairs: ExportedTokenizer) -> None:
    train_sp(tmp_path / "nfkc", model_type="bpe", byte_fallback=True)
    normalising = convert_tokenizer("sp", tmp_path / "nfkc", add_bos=False)
    assert "not normalise text" in differences(normalising)[0]
    parsed = json.loads(pairs.json)
    parsed["normalizer"] = {"type": "NFC"}
    assert "normalise" in differences(replace(pairs, json=json.dumps(parsed)))[0]
    parsed = json.loads(normalising.json)
    del parsed["model"]["merges"][0]
    assert "merges any two" in differences(replace(normalising, json=json.dumps(parsed)))[-1]


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"model_type": "bpe"}])
def test_tokenizers_that_it_has_not(
    options: dict[str, Any],
    tmp_path: Path,
    opened: Opened,
) -> None:
    train_sp(tmp_path / "m", **options)  # or without bytes
    converted = convert_tokenizer("sp", tmp_path / "m", add_bos=True)
    values = tokenizer_metadata(converted, 600)
    assert values == {
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.huggingface.json": converted.json,
    }
    assert "not text" in differences(converted)[0]


def test_keys() -> None:
    converted = convert_tokenizer("bytes", None, add_bos=True)
    config = converted.config | {"chat_template": "{{ messages }}"}
    converted = replace(converted, config=config, eos_ids=(257, 65))
    values = tokenizer_metadata(converted, 260)
    names, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(names, list) and isinstance(types, np.ndarray)
    assert names[256:] == ["<|begin_of_text|>", "<|end_of_text|>", "[PAD258]", "[PAD259]"]
    assert types.tolist() == [1] * 256 + [3, 3, 5, 5]
    assert values["tokenizer.ggml.bos_token_id"] == 256
    assert values["tokenizer.ggml.eos_token_id"] == 257
    assert values["tokenizer.ggml.eot_token_id"] == 65
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.add_eos_token"] is False
    assert values["tokenizer.chat_template"] == "{{ messages }}"
    assert values["tokenizer.huggingface.json"] == converted.json


def test_keys_of_sentencepiece(tmp_path: Path) -> None:
    train_sp(tmp_path / "m", model_type="bpe", byte_fallback=True, user_defined_symbols=["<sep>"])
    converted = convert_tokenizer("sp", tmp_path / "m", add_bos=False)
    values = tokenizer_metadata(converted, converted.vocab_size)
    names, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(names, list) and isinstance(types, np.ndarray)
    kinds = dict(zip(names, types.tolist(), strict=True))
    expected = {"<unk>": 2, "<s>": 3, "<sep>": 4, "<0x00>": 6, "<0xFF>": 6, "▁": 1}
    assert {name: kinds[name] for name in expected} == expected
    assert values["tokenizer.ggml.unknown_token_id"] == 0
