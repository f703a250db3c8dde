"""Tokenizers in Hugging Face's form: tokens that begin and end a text."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, processors

from stem_edge.errors import CheckpointError
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer, convert_tokenizer


def make_tokenizer(folder: Path, config: dict[str, Any], adds: list[str]) -> None:
    """Six tokens; `adds`, special ones among them, before every text."""
    vocab = {"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<|im_end|>": 4, "<x>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*adds, "$A"], special_tokens=[(name, vocab[name]) for name in adds]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def convert(folder: Path) -> ExportedTokenizer:
    return convert_tokenizer("json", folder / "tokenizer.json", add_bos=None)


@pytest.mark.parametrize(
    ("config", "adds", "expected"),
    [
        ({"bos_token": "<s>"}, ["<s>"], [2, 1]),
        ({"bos_token": "<s>"}, [], [1]),
        ({"bos_token": None}, [], [1]),
        ({"bos_token": "<s>", "add_bos_token": True}, [], [1]),
        ({"bos_token": "<s>", "add_bos_token": False}, ["<s>"], [2, 1]),
    ],
)
def test_a_text_begins_as_the_models_own_tokenizer_says(
    tmp_path: Path, config: dict[str, Any], adds: list[str], expected: list[int]
) -> None:
    make_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"} | config, adds)
    assert Tokenizer.from_str(convert(tmp_path).json).encode("b").ids == expected
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("b").input_ids == expected


def test_a_text_that_begins_with_other_tokens_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, {"bos_token": "<s>"}, ["<s>", "<x>"])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*\['<s>', '<x>'\] before"):
        convert(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_large_files_are_not_read(tmp_path: Path, name: str) -> None:
    make_tokenizer(tmp_path, {}, [])
    with (tmp_path / name).open("ab") as file:
        file.truncate(1 << 29)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=name):
        convert(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()


def test_what_ends_a_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, {"eos_token": "<|im_end|>", "chat_template": "{{ x }}"}, [])
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text("{}")
    assert convert(tmp_path).eos_ids == (4, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert convert(tmp_path).eos_ids == (4, 3)
    assert convert(tmp_path).config["chat_template"] == "{{ x }}"
