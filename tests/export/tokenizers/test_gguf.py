"""Tokenizers in GGUF files: llama.cpp's ids, special tokens, and what is refused."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exports import refused
from gemma_folders import write_tokenizer
from gguf_files import byte_chars, byte_keys, gemma_tokens, tokenizer_keys, write_file
from installed import DEMO
from llama_vocabulary import Encode, Vocabulary, vocabularies
from tokenizers import Tokenizer
from trained_tokenizers import TEXTS, train_sp

from stem_edge.export.tokenizers.gguf import CONTROL, NORMAL, USER_DEFINED
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer, convert_tokenizer

AT = "tokenizer.ggml."


def written(folder: Path, keys: dict[str, Any], **more: Any) -> Path:
    """Write a file with the keys of a tokenizer, and of no model."""
    changes = {AT + name: value for name, value in more.items()}
    kept = {k: v for k, v in (keys | changes).items() if v is not None}
    return write_file(folder / "t.gguf", {"general.architecture": "llama"} | kept, {})


def converted(path: Path) -> ExportedTokenizer:
    return convert_tokenizer("gguf", path, add_bos=None)


def ids(exported: ExportedTokenizer, text: str, add: bool = False) -> list[int]:
    found: list[int] = Tokenizer.from_str(exported.json).encode(text, add_special_tokens=add).ids
    return found


@pytest.fixture
def original() -> Iterator[Callable[[Path], Vocabulary]]:
    """Open the vocabulary of a file in llama.cpp."""
    with vocabularies() as opened:
        yield opened


def pairs_keys(pre: str) -> dict[str, Any]:
    """Any two bytes may merge, so that the ids of a text show where it was cut."""
    chars, rng = byte_chars(), random.Random(3)
    pairs = rng.sample([(a, b) for a in chars for b in chars], 20_000)
    names = [*chars, *(a + b for a, b in pairs), "<|start|>", "<|end|>", "<own>"]
    types = [NORMAL] * (len(names) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    keys: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": names, "token_type": types}
    keys |= {"merges": [f"{a} {b}" for a, b in pairs], "bos_token_id": len(names) - 3}
    return {AT + key: value for key, value in keys.items()}


# Not tekken: llama.cpp leaves the marks out of its pattern, which the models' own tokenizers have.
DISTINCT = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2")


def check(exported: ExportedTokenizer, encode: Encode, texts: list[str], add: bool) -> None:
    tokenizer = Tokenizer.from_str(exported.json)
    found = [tokenizer.encode(text, add_special_tokens=add).ids for text in texts]
    assert [t for t, one in zip(texts, found, strict=True) if one != encode(t, add)] == []


@pytest.mark.slow
@pytest.mark.parametrize("pre", DISTINCT)
def test_patterns_give_the_ids_of_llama_cpp(
    pre: str, original: Callable[[Path], Vocabulary], tmp_path: Path
) -> None:
    path = written(tmp_path, pairs_keys(pre))
    exported, special = converted(path), ["<|start|>a<|end|><own> b", "<|end|>", " <own> "]
    for add in (False, True):
        check(exported, original(path).encode, [*TEXTS, *special], add)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gives_the_ids_of_llama_cpp(
    prefix: bool, original: Callable[[Path], Vocabulary], tmp_path: Path
) -> None:
    model = tmp_path / "tokenizer.model"
    options: dict[str, Any] = {"normalization_rule_name": "identity", "byte_fallback": True}
    processor = train_sp(
        model, model_type="bpe", vocab_size=700, remove_extra_whitespaces=False, **options
    )
    size = processor.get_piece_size()
    types = [
        2 if processor.is_unknown(n) else 3 if processor.is_control(n)
        else 6 if processor.is_byte(n) else 1
        for n in range(size)
    ]  # fmt: skip
    keys = {
        "model": "llama", "tokens": [processor.id_to_piece(n) for n in range(size)],
        "scores": [processor.get_score(n) for n in range(size)], "token_type": types,
        "bos_token_id": processor.bos_id(), "eos_token_id": processor.eos_id(),
        "add_space_prefix": prefix,
    }  # fmt: skip
    path = written(tmp_path, {AT + key: value for key, value in keys.items()})
    exported = converted(path)
    assert exported.config["add_bos_token"] is True
    texts = [text for text in TEXTS if "\u2581" not in text]
    for add in (False, True):
        check(exported, original(path).encode, texts, add)
    sample = "a b  c\n\u6771 \U0001f600"
    assert Tokenizer.from_str(exported.json).decode(ids(exported, sample)) == sample


GEMMA_TEXTS = [
    *(text for text in TEXTS if "\u2581" not in text),
    "<bos>a<start_of_turn>user\nHi  there<end_of_turn>\n\n\n\n\u6771 \U0001f600", " <unk> x",
]  # fmt: skip


def gemma_file(folder: Path, kind: str) -> tuple[Tokenizer, Path]:
    """Write Gemma's tokenizer; return the original, and the file."""
    original = write_tokenizer(folder)
    return original, written(folder, gemma_tokens(folder, kind))


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_gemma_gives_the_ids_of_the_original(kind: str, tmp_path: Path) -> None:
    original, path = gemma_file(tmp_path, kind)
    found = converted(path)
    for add in (False, True):
        check(found, lambda text, add: original.encode(text, add_special_tokens=add).ids,
              [text for text in GEMMA_TEXTS if kind == "gemma4" or "  " not in text], add)  # fmt: skip
    assert found.config["add_bos_token"] is True
    assert original.token_to_id("<end_of_turn>") in found.eos_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_gemma_gives_the_ids_of_llama_cpp(
    kind: str, original: Callable[[Path], Vocabulary], tmp_path: Path
) -> None:
    _, path = gemma_file(tmp_path, kind)
    for add in (False, True):
        check(converted(path), original(path).encode, GEMMA_TEXTS, add)


def test_a_byte_level_tokenizer_gives_the_ids_of_its_json(tmp_path: Path) -> None:
    before = convert_tokenizer("json", DEMO / "tokenizer.json", add_bos=None)
    after = converted(written(tmp_path, tokenizer_keys(DEMO / "tokenizer.json", "llama-bpe")))
    assert (after.bos_id, after.eos_ids) == (before.bos_id, before.eos_ids)
    assert after.config == before.config
    check(after, lambda text, add: ids(before, text, add), TEXTS[:60], add=True)


def test_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    keys = byte_keys(262)
    names, types = keys[AT + "tokens"], keys[AT + "token_type"]
    names[257:] = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<own>"]
    types[257:] = [CONTROL, CONTROL, CONTROL, NORMAL, USER_DEFINED]
    template = "{{ bos_token }}{{ messages[0].content }}"
    path = written(
        tmp_path, keys | {"tokenizer.chat_template": template},
        bos_token_id=257, eos_token_id=258, eot_token_id=259, add_bos_token=True,
    )  # fmt: skip
    found = converted(path)
    assert (found.bos_id, found.eos_ids, found.vocab_size) == (257, (258, 259), 262)
    assert found.config["chat_template"] == template
    assert ids(found, "b<own><|im_end|>", add=True) == [257, 98, 261, 259]
    added = {token["content"]: token["special"] for token in json.loads(found.json)["added_tokens"]}
    assert added == {"<s>": True, "</s>": True, "<|im_end|>": True, "<own>": False}


MANY = [*map(str, range(1 + (1 << 19)))]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"model": "t5"}, "tokenizer.ggml.model is 't5'; expected 'gpt2', 'llama'"),
    "no kind": ({"model": None}, "tokenizer.ggml.model is None"),
    "another pattern": ({"pre": "gpt-5"}, "tokenizer.ggml.pre is 'gpt-5'; expected one of gpt-2"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens is None; expected a list of texts"),
    "numbers": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is [1, 2]; expected a list of texts"),
    "types": ({"token_type": [1]}, "tokenizer.ggml.token_type is not a list of 258"),
    "twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "1 tokens of 2 are there twice"),
    "too many": ({"tokens": MANY, "token_type": None}, "524,289 tokens"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges is None"),
    "an unknown merge": ({"merges": ["xx yy"]}, "xx"),
    "an id": ({"eos_token_id": 258}, "eos_token_id is 258; expected an id below 258"),
    "a negative id": ({"bos_token_id": True}, "bos_token_id is True"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores is not a list of 258"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    changes, said = CASES[case]
    path = written(tmp_path, byte_keys(258), **changes)
    refused(lambda: converted(path), path, said, "--tokenizer")


@pytest.mark.parametrize(
    ("names", "type", "said"),
    [
        (["a" * size for size in range(1, 1000)], NORMAL, "too long and too alike"),
        pytest.param(
            [*map(str, range(210_000))], NORMAL, "too long and too alike", marks=pytest.mark.slow
        ),
        (["a", "a" * 4097], NORMAL, "a token has 4097 characters ("),
        (["a", "a" * 4097], USER_DEFINED, "a token has 4097 characters ("),
        (
            [*map(str, range(1 + (1 << 15)))],
            CONTROL,
            "32,769 added tokens, expected at most 32,768",
        ),
    ],
    ids=["a ladder", "numerals", "long", "long and split off", "many that are split off"],
)
def test_tokens_that_would_take_gigabytes_are_refused(
    names: list[str], type: int, said: str, tmp_path: Path
) -> None:
    """The ladder took 1.5 GB, and with twice the steps more than 5."""
    size = {"scores": [0.0] * len(names), "token_type": [type] * len(names), "merges": None}
    path = written(tmp_path, byte_keys(258), model="llama", tokens=names, **size)
    tracemalloc.start()
    refused(lambda: converted(path), path, said, "--tokenizer")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300e6
