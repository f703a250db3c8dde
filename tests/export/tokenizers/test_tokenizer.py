"""Converted tokenizers, compared with the trainer's own library."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from trained_tokenizers import TEXTS

from stem_edge.errors import CheckpointError
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer


def test_bytes() -> None:
    exported = convert_tokenizer("bytes", None, add_bos=True)
    assert (exported.vocab_size, exported.bos_id, exported.eos_ids) == (258, 256, (257,))
    texts = [*TEXTS, "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = Tokenizer.from_str(exported.json)
    tokenizer.encode_special_tokens = (
        True  # as the trainer, to which names of special tokens are text
    )
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert ids == [list(text.encode()) for text in texts]
    assert [tokenizer.decode(each, skip_special_tokens=False) for each in ids] == texts


def test_bos_config_and_determinism() -> None:
    exported = convert_tokenizer("bytes", None, add_bos=True)
    assert exported == convert_tokenizer("bytes", None, add_bos=True)
    tokenizer = Tokenizer.from_str(exported.json)
    assert tokenizer.encode("abc").ids[0] == exported.bos_id
    assert exported.config["add_bos_token"] is True and exported.config["add_eos_token"] is False
    assert tokenizer.token_to_id(str(exported.config["bos_token"])) == exported.bos_id
    assert (tokenizer.token_to_id(str(exported.config["eos_token"])),) == exported.eos_ids
    bare = Tokenizer.from_str(convert_tokenizer("bytes", None, add_bos=False).json)
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
NULL_MAP = {"type": "Precompiled", "precompiled_charsmap": None}  # makes the library panic
NULL_MAP_IN = {"normalizer": NULL_MAP, "model": {"type": "WordLevel", "vocab": {"a": 0}}}


@pytest.mark.parametrize(
    ("kind", "content", "found"),
    [
        ("json", b"", "expected a tokenizer"), ("json", b"\xff\xfe", "DecodeError"),
        ("json", b"{}", "expected a tokenizer"), ("json", BAD_MODEL.encode(), "vocab is empty"),
        ("json", json.dumps(NULL_MAP_IN).encode(), "expected a tokenizer"),
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
    with pytest.raises(CheckpointError, match=r"bytes, json, gguf.*--tokenizer tokenizer.json"):
        convert_tokenizer("tiktoken", None, add_bos=False)
    with pytest.raises(CheckpointError, match=r"gone: no such file; copy .* --tokenizer FILE"):
        convert_tokenizer("json", tmp_path / "gone", add_bos=False)
    with pytest.raises(CheckpointError, match="'json' needs the path of a file"):
        convert_tokenizer("json", None, add_bos=False)
