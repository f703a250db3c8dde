"""A kept tokenizer: of parts of it, the library makes what it makes of all."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO, ROOT
from interrupts import interrupted
from random_tokenizer import write_tokenizer
from text_codecs import WORDS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import stem_edge
from stem_edge.errors import BundleError, InputError
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


SIZE = 8200  # more than there are tokens


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
    ids = [*range(700), *random.Random(0).choices(range(SIZE), k=700)]
    assert parts.decode(ids) == whole.decode(ids)
    assert [*map(parts.token_bytes, ids)] == [*map(whole.token_bytes, ids)]
    assert whole.special_tokens == parts.special_tokens
    assert whole.special_ids(()) == parts.special_ids(())
    assert whole.nbytes_to_come == 0 < parts.nbytes_to_come
    assert parts.every_token(SIZE) == whole.every_token(SIZE)  # it becomes the whole tokenizer
    assert parts.encode("some words") == whole.encode("some words")
    parts.read_whole(1 << 40)
    assert parts.nbytes_to_come == 0
    assert parts.encode("other words") == whole.encode("other words")


CALLS: list[Callable[[TextCodec], Any]] = [
    lambda codec: codec.encode(TEXT[:40]),
    lambda codec: codec.decode([300, 5]),
    lambda codec: codec.token_bytes(300),
    lambda codec: codec.is_silent(300),
    lambda codec: codec.every_token(SIZE),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_handler_is_refused_and_may_raise_anywhere(
    call: Callable[[TextCodec], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = both(tmp_path, byte_level)
    names, at = {"for_text", "for_ids", "whole", "_read"}, 0
    while interrupted(partial(call, parts), at, lambda code: code.co_name in names):
        assert call(parts) == call(whole)
        at, parts = at + 1, TextCodec(tmp_path / "tokenizer.json", kept=tmp_path / "kept")

    def handler(*_: object) -> None:
        for use in CALLS:
            with pytest.raises(InputError, match="cannot use the tokenizer mid-call"):
                use(parts)
        raise TimeoutError

    for name in names:
        monkeypatch.setattr(kept.KeptTokenizer, name, handler)
    with pytest.raises(TimeoutError):
        call(parts)


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


OTHERS = [
    models.Unigram([(word, -1.0) for word in WORDS], unk_id=0),
    models.BPE({"a": 0, "##a": 1}, [], continuing_subword_prefix="##"),
    models.BPE({"<0x41>": 0, "b": 1, "<0x41>b": 2}, [("<0x41>", "b")], byte_fallback=True),
    models.BPE({"a": 0}, [], unk_token="<unk>"),
]


@pytest.mark.parametrize("model", OTHERS)
def test_others_are_read_whole_each_time(model: Any, tmp_path: Path) -> None:
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
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


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: data[:-1],
    lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    lambda _: b"",
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("folder", ["tokenizers", "graphs"])
def test_a_damaged_file_is_made_again(damage: Any, folder: str, tmp_path: Path) -> None:
    def answer() -> str:
        with stem_edge.load(DEMO, cache_dir=tmp_path) as model:
            return model.generate_text("The capital of Spain is", max_new_tokens=2)

    expected, (file,) = answer(), (tmp_path / folder).iterdir()
    file.write_bytes(damage(good := file.read_bytes()))
    assert answer() == expected and file.read_bytes() == good


def test_a_load_checks_a_tokenizer_once_and_another_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, cache = tmp_path / "bundle", tmp_path / "cache"
    shutil.copytree(DEMO, bundle)
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
