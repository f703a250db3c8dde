"""Converted tokenizers, compared with the trainer's own library."""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from trained_tokenizers import TEXTS, train_ranks, train_sp, write_ranks

from stem_edge.errors import CheckpointError
from stem_edge.export.tokenizers import ranks, sentencepiece
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


@pytest.fixture(scope="module")
def sp_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    train_sp(path, model_type="bpe", normalization_rule_name="identity", byte_fallback=True)
    return path


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


@pytest.mark.slow
@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("rules", ["identity", "nmt_nfkc", "nmt_nfkc_cf"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, rules: str, fallback: bool, strip: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_type": kind, "normalization_rule_name": rules}
    options |= {"byte_fallback": fallback, "remove_extra_whitespaces": strip}
    original = train_sp(tmp_path / "m.model", **options)
    exported = convert_tokenizer("sp", tmp_path / "m.model", add_bos=True)
    assert exported.vocab_size == original.vocab_size()
    assert (exported.bos_id, exported.eos_ids) == (original.bos_id(), (original.eos_id(),))
    texts = [*TEXTS, "<s>a</s> <unk> b"]
    assert differing(exported, original.encode, texts) == []
    if rules == "identity" and fallback and not strip:
        kept = [text for text in TEXTS if "▁" not in text]  # sentencepiece reads it as a space
        assert [text for text in kept if round_trip(exported, text) != text] == []


def test_sentencepiece_special_tokens(sp_file: Path) -> None:
    tokenizer = Tokenizer.from_str(convert_tokenizer("sp", sp_file, add_bos=True).json)
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    assert tokenizer.encode("<s>a</s>", add_special_tokens=False).ids == [1, *plain, 2]
    assert tokenizer.encode("a").ids == [1, *plain]
    assert tokenizer.decode([1, *plain, 2]) == "a"


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "sp"])
def test_bos_config_and_determinism(kind: str, ranks_file: Path, sp_file: Path) -> None:
    path = {"bytes": None, "tiktoken": ranks_file, "sp": sp_file}[kind]
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
        ("sp", b"", "expected a sentencepiece"), ("sp", b"not a model", "expected a sentencepiece"),
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
    ("option", "value"),
    [
        ("model_type", "char"),
        ("treat_whitespace_as_suffix", True),
        ("user_defined_symbols", ["①"]),  # nmt_nfkc makes it a 1
    ],
)
def test_sentencepiece_kind_that_cannot_be_converted(
    option: str, value: object, tmp_path: Path
) -> None:
    train_sp(tmp_path / "m", **{option: value})
    with pytest.raises(CheckpointError, match=r"m: .*expected a sentencepiece BPE or unigram"):
        convert_tokenizer("sp", tmp_path / "m", add_bos=False)


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
    with pytest.raises(CheckpointError, match=r"bytes, tiktoken, sp, json.*--tokenizer"):
        convert_tokenizer("mock", None, add_bos=False)
    with pytest.raises(CheckpointError, match="no gone; add one or pass --tokenizer FILE"):
        convert_tokenizer("sp", tmp_path / "gone", add_bos=False)
    with pytest.raises(CheckpointError, match="'sp' needs the path of a file"):
        convert_tokenizer("sp", None, add_bos=False)


MIXED = st.lists(st.one_of(st.sampled_from([*TEXTS, " ", "  ", "<sep>", "▁"]), st.text(max_size=6)))


def check_any(exported: ExportedTokenizer, encode: Any) -> None:
    """Compare on texts of any characters."""

    @settings(max_examples=300, deadline=None)
    @given(MIXED.map("".join))
    def check(text: str) -> None:
        assert ours(text) == encode(text)

    ours = as_trainer(exported)
    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "byte_fallback": True},
        {"model_type": "bpe", "remove_extra_whitespaces": False},
        {"model_type": "unigram", "byte_fallback": True, "remove_extra_whitespaces": False},
        {"model_type": "unigram", "user_defined_symbols": ["<sep>"], "add_dummy_prefix": False},
    ],
)
def test_sentencepiece_of_any_characters(options: dict[str, Any], tmp_path: Path) -> None:
    original = train_sp(tmp_path / "m", normalization_rule_name="identity", **options)
    check_any(convert_tokenizer("sp", tmp_path / "m", add_bos=False), original.encode)


@pytest.mark.slow
def test_tiktoken_of_any_characters(ranks_file: Path) -> None:
    original = tiktoken.Encoding(
        "", pat_str=PATTERN, mergeable_ranks=train_ranks(400), special_tokens={}
    )
    check_any(convert_tokenizer("tiktoken", ranks_file, add_bos=False), original.encode_ordinary)


@pytest.mark.parametrize(
    ("kind", "module", "made"),
    [
        ("tiktoken", ranks, "merges"),
        ("sp", sentencepiece, "merges"),
        ("sp", sentencepiece, "_normalizer"),
    ],
)
def test_a_conversion_with_other_ids_ends_the_export(
    kind: str, module: ModuleType, made: str, ranks_file: Path, sp_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As if the library changed."""
    monkeypatch.setattr(module, made, lambda *_: [])
    path = {"tiktoken": ranks_file, "sp": sp_file}[kind]
    with pytest.raises(CheckpointError) as caught:
        convert_tokenizer(kind, path, add_bos=True)
    words = r"reads '.+' after '.*' other than the original: expected ids \[\d.*\], found \[\d.*\]"
    assert re.search(words, str(caught.value)) and str(path) in str(caught.value)


@pytest.mark.parametrize(("kind", "package"), [("tiktoken", "tiktoken"), ("sp", "sentencepiece")])
def test_without_the_trainers_library(
    kind: str, package: str, sp_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=rf"needs {package}.*stem-edge\[export\]"):
        convert_tokenizer(kind, sp_file, add_bos=True)
