"""A kept tokenizer: of parts of it, the library makes what it makes of all."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed import ROOT
from random_tokenizer import write_tokenizer
from text_codecs import WORDS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import stem_edge
from stem_edge.errors import BundleError
from stem_edge.runtime.text import kept
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.text.kept import open_kept

TEXT = (ROOT / "README.md").read_text("utf-8")
TEXTS = [TEXT[at : at + 200] for at in range(0, 2000, 200)]
TEXTS += [
    "",
    "a",
    "aaaaaaaa",
    " b  c ",
    "\n\n\t",
    "ünï 😀 中文 가나 \x00",
    "<bos><unused3> <|end|>x<tool>",
]


def like_gemma(folder: Path) -> None:
    write_tokenizer(folder, 8000)


def byte_level(folder: Path, **options: Any) -> None:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    # Not in the model, like those of Llama 3, while a word of the model is added, too.
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("the")])
    tokenizer.save(str(folder / "tokenizer.json"))


def whole_words(folder: Path) -> None:
    byte_level(folder, ignore_merges=True)


KEPT = pytest.mark.parametrize("write", [like_gemma, byte_level, whole_words])


def both(folder: Path, write: Callable[[Path], None]) -> tuple[TextCodec, TextCodec]:
    """Return a codec of the whole tokenizer, and one of the file that is kept of it."""
    write(folder)
    path = folder / "tokenizer.json"
    return TextCodec(path), TextCodec(path, kept=folder / "kept")


@KEPT
def test_texts_have_the_same_ids_and_ids_the_same_text(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    whole, parts = both(tmp_path, write)
    for text in TEXTS:
        for special in (False, True):
            expected = whole.encode(text, special_tokens_in_text=special)
            assert parts.encode(text, special_tokens_in_text=special) == expected
            for skip in (False, True):
                found = parts.decode(expected, skip_special_tokens=skip)
                assert found == whole.decode(expected, skip_special_tokens=skip)
    ids = random.Random(0).choices(range(whole.count + 2), k=700)
    assert parts.decode(ids) == whole.decode(ids)
    assert [*map(parts.token_bytes, ids)] == [*map(whole.token_bytes, ids)]
    facts = [
        (c.count, c.special_tokens, c.special_ids(()), c.nbytes_to_come) for c in (whole, parts)
    ]
    assert facts[0][:3] == facts[1][:3]
    assert facts[0][3] == 0 < facts[1][3]


@KEPT
def test_it_becomes_the_whole_tokenizer(write: Callable[[Path], None], tmp_path: Path) -> None:
    whole, parts = both(tmp_path, write)
    parts.encode("some words")
    size = max(whole.count, parts.count)
    assert parts.every_token(size) == whole.every_token(size)
    assert parts.encode("some words") == whole.encode("some words")
    parts.read_whole(1 << 40)
    assert parts.nbytes_to_come == 0
    assert parts.encode("other words") == whole.encode("other words")


def test_the_library_gets_what_texts_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(tmp_path, like_gemma)
    found = open_kept(tmp_path / "kept")
    assert found is not None
    assert found.for_text("abc", True).get_vocab_size(with_added_tokens=False) < 300
    monkeypatch.setattr(kept, "MOST_WRITTEN", 40)
    for start in range(300, 400, 20):
        writer = found.for_ids(range(start, start + 20))
        assert writer.get_vocab_size(with_added_tokens=False) <= 60
    monkeypatch.setattr(kept, "MOST_PARTS", 20)
    assert found.for_text("abcdefg", True).get_vocab_size(with_added_tokens=False) == 8000


def unigram(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.Unigram([(word, -1.0) for word in WORDS], unk_id=0)


def affixes(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.BPE({"a": 0, "##a": 1}, [], continuing_subword_prefix="##")


def joined_bytes(tokenizer: Tokenizer) -> None:
    vocab = {"<0x41>": 0, "b": 1, "<0x41>b": 2}
    tokenizer.model = models.BPE(vocab, [("<0x41>", "b")], byte_fallback=True)


def missing_unknown(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.BPE({"a": 0}, [], unk_token="<unk>")


@pytest.mark.parametrize("change", [unigram, affixes, joined_bytes, missing_unknown])
def test_others_are_read_whole_each_time(
    change: Callable[[Tokenizer], None], tmp_path: Path
) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    change(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    TextCodec(tmp_path / "tokenizer.json", None, None, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_the_unknown_token_is_merged_also_after_its_parts(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        vocab = ["<unk>", *"<unk>", "un", "<un", "k>"]
        merges = [("u", "n"), ("<", "un"), ("k", ">"), ("<un", "k>")]
        ids = {token: id_ for id_, token in enumerate(vocab)}
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
        tokenizer.save(str(folder / "tokenizer.json"))

    whole, parts = both(tmp_path, write)
    for text in ("<un k>", "<unk>"):
        assert parts.encode(text) == whole.encode(text)


def cut(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, flipped, empty])
def test_a_damaged_file_is_made_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    both(tmp_path, like_gemma)
    file = tmp_path / "kept"
    file.write_bytes(damage(good := file.read_bytes()))
    assert open_kept(file) is None
    TextCodec(tmp_path / "tokenizer.json", None, None, file)
    assert file.read_bytes() == good


def test_a_load_checks_a_tokenizer_once_and_another_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, cache = tmp_path / "bundle", tmp_path / "cache"
    shutil.copytree(ROOT / "stem_edge" / "demo_model", bundle)
    with stem_edge.load(bundle, cache_dir=cache) as model:
        expected = model.tokenize("The capital of Spain")
    monkeypatch.setattr("stem_edge.text.tokenizer_gate.check_json", lambda *_: pytest.fail("again"))
    with stem_edge.load(bundle, cache_dir=cache) as model:
        assert model.tokenize("The capital of Spain") == expected
    monkeypatch.undo()
    file = bundle / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"BPE"', b'"B\\"E'))
    with pytest.raises(BundleError, match="not a tokenizer"):
        stem_edge.load(bundle, cache_dir=cache)
