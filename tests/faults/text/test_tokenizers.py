"""Hostile tokenizers: refused before native code reads them, or for one text only."""

from __future__ import annotations

import copy
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from contract import command_refused, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import DEMO
from text_codecs import probe_texts

from stem_edge.errors import BundleError, InputError
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text.tokenizer_gate import check_tokenizer
from stem_edge.text.tokenizer_steps import KINDS, MAX_DEPTH

SIZE = 1756
DEMO_JSON = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
BEGIN = "<|begin_of_text|>"
CODEC = TextCodec(DEMO / "tokenizer.json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer.json"


def write(path: Path, **parts: Any) -> Path:
    """Write the demo's tokenizer with other parts; `model` changes fields of its model."""
    document = copy.deepcopy(DEMO_JSON)
    document["model"] |= parts.pop("model", {})
    path.write_text(json.dumps(document | parts))
    return path


def replaces(count: int, length: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * length}
    return {"type": "Sequence", "normalizers": [step] * count}


def test_t1_a_missing_empty_cut_or_other_file_is_refused(path: Path) -> None:
    refused(lambda: check_tokenizer(path), BundleError, path, "No such file")
    whole = (DEMO / "tokenizer.json").read_bytes()
    coded = [
        b'{"version": "\xff"}',
        b'{"version": "\\ud800"}',
        '{"version": "1.0"}'.encode("utf-16"),
    ]
    others = [b"hello", b"[]", b"null", b"\xef\xbb\xbf" + whole, *coded]
    for data in (b"", whole[:-1], whole[:1000], *others):
        path.write_bytes(data)
        refused(lambda: TextCodec(path), BundleError, path, "not a tokenizer.json", kept=[path])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
def test_t1_paths_that_are_not_files_are_refused(path: Path) -> None:
    path.mkdir()
    refused(lambda: TextCodec(path), BundleError, path)
    path.rmdir()
    os.mkfifo(path)
    refused(lambda: TextCodec(path), BundleError, path, "not a regular file")
    path.unlink()
    path.symlink_to(DEMO / "tokenizer.json")
    refused(lambda: TextCodec(path), BundleError, path, "not a regular file")


def test_t2_a_panic_at_load_that_no_check_foresees(path: Path) -> None:
    """The merges name a token that the prefix removes."""
    model = {"vocab": {"a": 0, "b": 1, "aa": 2}, "merges": [["a", "a"]]}
    model["continuing_subword_prefix"] = "xyz"
    write(path, added_tokens=[], post_processor=None, model=model)
    refused(lambda: TextCodec(path), BundleError, path, "out of range")


@pytest.mark.parametrize("part", KINDS)
def test_t3_thousands_of_steps_in_steps(path: Path, part: str) -> None:
    field = KINDS[part][0]
    for depth, expected in ((5000, "recursion"), (MAX_DEPTH + 1, f"more than {MAX_DEPTH} deep")):
        step = f'{{"type": "Sequence", "{field}": [' * depth + "]}" * depth
        document = json.dumps(DEMO_JSON | {part: 0}).replace(f'"{part}": 0', f'"{part}": {step}')
        path.write_text(document)
        refused(lambda: TextCodec(path), BundleError, path, expected)


def catastrophic(path: Path) -> TextCodec:
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    return TextCodec(write(path, pre_tokenizer=split))


def test_t4_a_regular_expression_that_gives_up_refuses_that_text_alone(path: Path) -> None:
    codec, hostile = catastrophic(path), "a" * 40 + "!"
    results: list[object] = []

    def in_a_thread() -> None:
        refused(lambda: codec.encode(hostile), InputError, path, "cannot process this text")
        results.append(codec.decode(codec.encode("good"), skip_special_tokens=True))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert results == ["good"]


def test_t5_steps_that_multiply_a_little_are_counted_against_long_texts(path: Path) -> None:
    codec = TextCodec(write(path, normalizer=replaces(2, 10)))
    assert len(codec.encode("a", add_special_tokens=False)) <= 100
    assert codec.decode(codec.encode("a")) == "a" * 100
    refused(lambda: codec.encode("b" * 3_000_000), InputError, path, "3,000,000", "1,342,177")


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}),
        ("truncation", {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}),
        ("model", {"dropout": 0.5}),  # of a training
    ],
)  # fmt: skip
def test_t6_t7_what_would_change_ids_is_left_out(path: Path, block: str, value: object) -> None:
    codec = TextCodec(write(path, **{block: value}))
    for text in probe_texts():
        assert codec.encode(text) == CODEC.encode(text)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"vocab": {"a": 0, "b": 2**32 - 1}}, "4294967295"), ({"vocab": {"a": 0, "b": -1}}, ">= 0"),
        ({"vocab": {"a": 0, "b": 0}}, "both have id 0"),
        ({"vocab": {"a": 0, "b": 1.0}}, "got `float`"),
        ({"vocab": {"a": 0, "b" * 5000: 1}}, "5000 characters"), ({"vocab": {}}, "empty"),
        ({"vocab": None}, "null"), ({"type": "Unigram", "vocab": []}, "empty"),
        ({"type": "Unigram", "vocab": [["a"]]}, "not a tokenizer.json"),
        ({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0], ["a", 1]]}, "2 entries for 1 tokens"),
        ({"type": "Magic"}, "'Magic'"), ({"unk_token": "x" * 5000}, "unk_token"),
    ],
)  # fmt: skip
def test_t7_ids_that_are_not_one_for_each_token(path: Path, model: Any, named: str) -> None:
    write(path, added_tokens=[], post_processor=None, model={"merges": []} | model)
    refused(lambda: TextCodec(path, SIZE), BundleError, path, named)


def test_t7_tokens_that_are_named_twice(path: Path) -> None:
    text = json.dumps(DEMO_JSON)
    path.write_text(text.replace('"vocab": {', '"vocab": {"\\u0061": 0, ', 1))
    refused(lambda: TextCodec(path), BundleError, path, "1501 entries for 1500 tokens")
    for content, number in ((BEGIN, 7), ("a", 1501), ("new", 1500)):
        added = copy.deepcopy(DEMO_JSON["added_tokens"])
        added.append(added[0] | {"content": content, "id": number})
        write(path, added_tokens=added)
        refused(lambda: TextCodec(path), BundleError, path)


@pytest.mark.parametrize(
    ("merges", "named"),
    [
        ([["a", "b"], ["a", "b"]], "2 entries, 1 of them distinct"),
        (["a b", "a b"], "2 entries, 1 of them distinct"),
        ([["a", "b"]] * 10, "more than 9 entries for 3 tokens"),
        (["a b c"], "'a b c', expected two tokens"),
        ([["a", "x"]], "'x', which model.vocab lacks"),
        ([["a", "b"], 7], "expected pairs of tokens"),
        ({"a": "b"}, "not a list"),
    ],
)
def test_t7_merges_that_no_tokens_need(path: Path, merges: list[Any], named: str) -> None:
    """The library takes half a kilobyte for each, before it looks at it."""
    model = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": merges}
    write(path, added_tokens=[], post_processor=None, model=model)
    refused(lambda: TextCodec(path), BundleError, path, named)


def test_t8_two_tokens_exchanged_show_only_in_the_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is a valid tokenizer, but of another model."""
    bundle = tmp_path / "bundle"
    shutil.copytree(DEMO, bundle)
    file = bundle / "tokenizer.json"
    vocab = dict(DEMO_JSON["model"]["vocab"])
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    write(file, model={"vocab": vocab})
    assert TextCodec(file, SIZE).encode("a") != CODEC.encode("a")
    command_refused(capsys, ["verify", bundle], "1 of ", kept=[bundle])


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_t16_any_text_survives_or_is_refused(text: str) -> None:
    assert CODEC.decode(CODEC.encode_prompt(text, 10**6, 10**6)) == text if text else True
