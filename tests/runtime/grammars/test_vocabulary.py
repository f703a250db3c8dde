"""Every kind of tokenizer that a bundle can have writes what a grammar allows, or is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizer_files import write
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from stem_edge.errors import InputError
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.runtime.grammars.constraint import Grammars
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.text.codec import TextCodec

EXTRA = 60  # rows of the model beyond the tokenizer's ids


def exported(folder: Path) -> tuple[str, tuple[int, ...]]:
    made = convert_tokenizer("bytes", None, add_bos=True)
    return made.json, tuple(made.eos_ids)


def metaspace(prepend: str) -> Callable[[Path], tuple[str, tuple[int, ...]]]:
    """Unigram pieces, of which each printable character is one, joined by a Metaspace decoder."""

    def make(folder: Path) -> tuple[str, tuple[int, ...]]:
        pieces = ["</s>", "<unk>", "\u2581", *map(chr, range(33, 127)), "\u2581a", "ab", "\n", "é"]
        made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=1))
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
        made.decoder = decoders.Metaspace(prepend_scheme=prepend)
        made.add_special_tokens(["</s>", "<unk>"])
        return made.to_str(), (0,)

    return make


def with_bytes(
    make: Callable[[list[str]], models.Model],
) -> Callable[[Path], tuple[str, tuple[int, ...]]]:
    """Pieces as sentencepiece has them: each printable character is one, other characters are bytes."""

    def made(folder: Path) -> tuple[str, tuple[int, ...]]:
        pieces = ["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
        tokenizer = Tokenizer(make([*pieces, *map(chr, range(33, 127)), "\u2581a", "ab", "é"]))
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
        tokenizer.add_special_tokens(["</s>", "<unk>"])
        return tokenizer.to_str(), (0,)

    return made


def bpe(pieces: list[str]) -> models.Model:
    known = {piece: number for number, piece in enumerate(pieces)}
    pairs = [("\u2581", "a"), ("a", "b")]
    return models.BPE(known, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def unigram(pieces: list[str]) -> models.Model:
    return models.Unigram([(piece, -1.0) for piece in pieces], unk_id=1, byte_fallback=True)


KINDS = {
    "bytes": exported,
    "sentencepiece": with_bytes(bpe),
    "unigram": with_bytes(unigram),
    "metaspace": metaspace("always"),
    "metaspace, none first": metaspace("never"),
}


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextCodec, tuple[int, ...], int]:
    folder = tmp_path_factory.mktemp("kind")
    text, eos_ids = KINDS[request.param](folder)
    (folder / "tokenizer.json").write_text(text)
    size = Tokenizer.from_str(text).get_vocab_size() + EXTRA
    return TextCodec(folder / "tokenizer.json", size), eos_ids, size


def written(opened: tuple[TextCodec, tuple[int, ...], int], grammar: Grammar, seed: int) -> str:
    """Return what random logits write, the end as soon as it is allowed; forced tokens at once."""
    codec, eos_ids, size = opened
    constraint = Grammars(codec, eos_ids, size).open(grammar)
    rng, ids = np.random.default_rng(seed), list[int]()
    while not constraint.ended:
        forced = constraint.forced(8)
        logits = rng.standard_normal(size).astype(np.float32)
        logits[list(eos_ids)] += 9
        constraint.mask(logits)
        assert np.isneginf(logits[-EXTRA:]).all()
        token = int(logits.argmax())
        assert not forced or np.isfinite(logits[forced[0]])
        if token in eos_ids:
            break
        for each in forced or [token]:
            constraint.accept(each)
            ids.append(each)
    return codec.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("regex", [r"[a-z]{3} [0-9]{2}: (yes|no)\.", r"a b  c\nd", "[\x20-~]{9}x"])
def test_regular_expressions(opened: tuple[TextCodec, tuple[int, ...], int], regex: str) -> None:
    for seed in range(5):
        text = written(opened, Grammar.of_regex(regex), seed)
        # Decoders of pieces drop the space that their tokenizers put before a text.
        assert re.fullmatch(regex, text) or re.fullmatch(regex, f" {text}"), text


def test_schemas(opened: tuple[TextCodec, tuple[int, ...], int]) -> None:
    schema = {
        "type": "object", "required": ["a name", "b"], "additionalProperties": False,
        "properties": {
            "a name": {"enum": ["two  words", "é"]},
            "b": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        },
    }  # fmt: skip
    for seed in range(5):
        value = json.loads(written(opened, Grammar.of_schema(schema), seed))
        assert value["a name"] in ("two  words", "é") and 2 <= len(value["b"]) <= 3


def test_characters_that_a_tokenizer_lacks(tmp_path: Path) -> None:
    text, eos_ids = KINDS["metaspace"](tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    codec = TextCodec(tmp_path / "tokenizer.json")
    grammars = Grammars(codec, eos_ids, 200)
    forced = grammars.open(Grammar.of_regex("xabab e\u0301 ab")).forced(9)
    assert codec.decode(forced) == "xabab e"  # as far as there are tokens for it
    with pytest.raises(InputError, match=r"by (the|its) grammar|no text matches"):
        constraint = grammars.open(Grammar.of_regex("ж"))
        constraint.mask(np.zeros(200, np.float32))
        constraint.accept(1)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_tokens_without_bytes_of_their_own(tmp_path: Path, decoder: object) -> None:
    path = write(tmp_path / "tokenizer.json", decoder=decoder)
    with pytest.raises(InputError, match="joins tokens by spaces"):
        Grammars(TextCodec(path), (1,), 2).open(Grammar.of_regex("a"))
    with pytest.raises(InputError, match="names no token that ends an answer"):
        Grammars(TextCodec(path), (), 2).open(Grammar.of_regex("a"))
