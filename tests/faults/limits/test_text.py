"""Limits of tokenizers and texts: just inside is accepted, just outside is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from contract import refused, takes
from tokenizer_files import WORDS, added, write

from stem_edge.errors import BundleError, InputError
from stem_edge.limits import MAX_VOCAB
from stem_edge.runtime.text import codec as text
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text import tokenizer_gate
from stem_edge.text.tokenizer_gate import AddedToken, check_tokenizer

SIZE = 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer.json"


# A tokenizer's file


def test_the_size_of_a_tokenizer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = write(path).stat().st_size
    monkeypatch.setattr(tokenizer_gate, "MAX_NBYTES", nbytes)
    check_tokenizer(path)
    path.write_bytes(path.read_bytes() + b" ")
    refused(lambda: check_tokenizer(path), BundleError, path, f"larger than {nbytes:,} bytes")


def test_the_number_of_added_tokens(path: Path) -> None:
    def with_tokens(count: int) -> None:
        check_tokenizer(write(path, added_tokens=[added(0, "a")] * count))

    takes(with_tokens, tokenizer_gate.MAX_ADDED, "32768")


@pytest.mark.parametrize("place", ["model", "added_tokens"])
def test_the_length_of_a_token(path: Path, place: str) -> None:
    def with_token(length: int) -> None:
        if place == "model":
            write(path, WORDS | {"vocab": {"a": 0, "x" * length: 1}})
        else:
            write(path, added_tokens=[added(2, "x" * length)])
        assert check_tokenizer(path).longest_nbytes == length

    takes(with_token, tokenizer_gate.MAX_TOKEN_CHARS, "4096")
    refused(
        lambda: check_tokenizer(write(path, added_tokens=[added(2, "")])), BundleError, "content"
    )


def test_the_longest_token_is_counted_in_bytes_and_shown_in_part(path: Path) -> None:
    vocab = {"a": 0, "\u00e9" * 3: 1, "xxxx": 2}
    assert check_tokenizer(write(path, WORDS | {"vocab": vocab})).longest_nbytes == 6
    write(path, WORDS | {"vocab": {"a": 0, "x" * 5000: 1}})
    refused(lambda: check_tokenizer(path), BundleError, "5000 characters ('" + "x" * 20 + "'...)")


@pytest.mark.parametrize(("size", "most"), [(SIZE, SIZE - 1), (2, 1), (None, MAX_VOCAB - 1)])
def test_the_ids_of_tokens(path: Path, size: int | None, most: int) -> None:
    def with_id(number: int) -> None:
        check_tokenizer(write(path, WORDS | {"vocab": {"a": 0, "b": number}}), size)

    takes(with_id, most, f"the token 'b' has the id {most + 1}, expected 0 to {most}")


def test_what_is_left_out_of_a_file_has_the_librarys_defaults(path: Path) -> None:
    told = json.loads(check_tokenizer(write(path, added_tokens=[added(2, "c")])).json)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    assert told["added_tokens"] == [{"id": 2, "content": "c", "normalized": True, **flags}]
    assert told["version"] == "1.0"
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    assert {name: told[name] for name in parts} == dict.fromkeys(parts)
    assert told["model"] == WORDS
    assert msgspec.to_builtins(AddedToken(1, "x")).keys() == flags.keys() | {
        "id",
        "content",
        "normalized",
    }


# Text


def growing(path: Path, times: int) -> TextCodec:
    """Make a codec that lengthens a text so many times."""
    step = {"type": "Replace", "pattern": {"String": "b"}, "content": "b" * times}
    return TextCodec(write(path, normalizer=step, added_tokens=[added(2, "<c>", special=True)]))


def test_the_limit_of_a_texts_growth(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_GROWN", 30)
    codec = growing(path, 3)
    assert codec.encode("aaaaaaaa\u00e9")
    message = refused(lambda: codec.encode("a" * 11), InputError, path, "11 bytes")
    assert message.endswith("may turn each byte into 3; give at most 10 bytes")
