"""Limits of the steps of tokenizers: just inside is accepted, just outside is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from contract import takes

from stem_edge.text import tokenizer_steps
from stem_edge.text.tokenizer_steps import KINDS, check_model, check_steps

SIZE = 100
Step = dict[str, Any]


def sequences(depth: int, part: str = "normalizer") -> Step:
    kind = {"normalizer": "NFC", "decoder": "Fuse"}[part]
    step: Step = {"type": kind}
    for _ in range(depth):
        step = {"type": "Sequence", KINDS[part][0]: [step]}
    return step


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_the_depth_of_sequences(part: str) -> None:
    said = f"{part} has sequences more than 8 deep"
    takes(lambda depth: check_steps({part: sequences(depth, part)}, SIZE), 8, said)


def in_sequence(*steps: Step) -> Step:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


SHORT = ("prepend", "prefix", "suffix", "replacement", "content", "pad_token")


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        *((name, "{}", 256) for name in SHORT),
        *(("other", value, 2**14) for value in ("{}", ["", {"a": ["{}"]}], {"{}": 0})),
    ],
)
def test_the_length_of_texts(name: str, value: object, most: int) -> None:
    def with_text(length: int) -> None:
        filled = json.loads(json.dumps(value).replace("{}", "x" * length))
        check_steps(in_sequence({"type": "Lowercase", name: filled}), SIZE)

    where = rf"normalizer\.normalizers\[0\]\.{name} has {most + 1} characters"
    takes(with_text, most, f"{where}, expected at most {most}")


def charsmap(nbytes: int, texts: bytes = b"", told: int | None = None) -> str:
    size = (nbytes if told is None else told).to_bytes(4, "little")
    return base64.b64encode(size + bytes(nbytes) + texts).decode()


def growth(*steps: Step, part: str = "normalizer") -> int:
    field = KINDS[part][0]
    return check_steps({part: {"type": "Sequence", field: list(steps)}}, SIZE)


def precompiled(value: object) -> int:
    return growth({"type": "Precompiled", "precompiled_charsmap": value})


def test_a_map_of_characters() -> None:
    assert precompiled(charsmap(4)) == 1
    assert precompiled(charsmap(8, b"ab\0abc\0a\0")) == 3
    assert precompiled(charsmap(256, b"\0")) == 1
    assert precompiled(base64.b64encode(b"\4\0\0\0\1\1\1\1abc\0").decode()) == 3
    for value in (charsmap(4, told=8), charsmap(4, told=0), charsmap(6), charsmap(4, told=5)):
        with pytest.raises(ValueError, match="with a trie of"):
            precompiled(value)
    for short in (b"", b"\4\0\0"):
        with pytest.raises(ValueError, match=f"is {len(short)} bytes with a trie"):
            precompiled(base64.b64encode(short).decode())
    with pytest.raises(ValueError, match="is null, expected"):
        precompiled(None)
    for none in ("!", charsmap(4) + "!", 3):
        with pytest.raises(ValueError, match="is not base64, expected"):
            precompiled(none)


def test_the_size_of_a_map_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = charsmap(44)
    monkeypatch.setattr(tokenizer_steps, "MAX_CHARSMAP", len(whole))
    assert precompiled(whole) == 1
    with pytest.raises(ValueError, match=f"expected at most {len(whole)}"):
        precompiled(charsmap(48))


def replace(pattern: object, content: object) -> Step:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("step", "times"),
    [
        (replace({"String": "a"}, "b"), 1),
        (replace({"String": "a"}, ""), 1),
        (replace({"String": "ab"}, "abc"), 2),
        (replace({"String": "ab"}, "abcd"), 2),
        (replace({"String": "\u00e9"}, "abcde"), 3),
        (replace({"String": "a"}, "\u00e9"), 2),
        (replace({"String": ""}, "ab"), 3),
        (replace({"Regex": "a"}, "ab"), 3),
        (replace("a", "ab"), 3),
        (replace(None, None), 5),
        ({"type": "Replace"}, 1),
        ({"type": "ByteLevel"}, 2),
        ({"type": "NFKC"}, 11),
        ({"type": "NFKD"}, 11),
        ({"type": "NFC"}, 1),
    ],
)
def test_times_that_a_step_lengthens_a_text(step: Step, times: int) -> None:
    assert growth(step) == times


def test_times_that_steps_lengthen_a_text() -> None:
    assert growth({"type": "NFKC"}, {"type": "NFKC"}, {"type": "NFKD"}) == 11
    assert growth({"type": "Metaspace"}, part="pre_tokenizer") == 3
    double, half = replace({"String": "a"}, "bb"), {"type": "Lowercase"}
    assert growth(*[double] * 11, half) == 2048
    with pytest.raises(ValueError, match=r"normalizer can make a text 4,096 times as long"):
        growth(*[double] * 12)
    with pytest.raises(ValueError, match=r"1,000,000,000,000 times"):
        growth(*[double] * 50)


def bert(number: object, kind: str = "BertProcessing", field: str = "sep") -> Step:
    other = {"sep": "cls", "cls": "sep"}[field]
    return {"post_processor": {"type": kind, field: ["x", number], other: ["y", 0]}}


@pytest.mark.parametrize("kind", ["BertProcessing", "RobertaProcessing"])
@pytest.mark.parametrize("field", ["sep", "cls"])
def test_ids_around_a_text(kind: str, field: str) -> None:
    takes(
        lambda number: check_steps(bert(number, kind, field), SIZE),
        SIZE - 1,
        "post_processor adds the id 100, expected 0 to 99",
    )
    for number in (-1, True, 1.0, "1", None):
        with pytest.raises(ValueError, match="post_processor adds the id"):
            check_steps(bert(number, kind, field), SIZE)


def template(single: object, ids: object = (0,), **more: Any) -> dict[str, Any]:
    special = {"a": {"id": "a", "ids": ids if ids is None else list(ids), "tokens": ["a"]}}  # type: ignore[call-overload]
    step = {"type": "TemplateProcessing", "single": single, "special_tokens": special}
    return {"post_processor": step | more}


TEXT, TOKEN = {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "a"}}


def test_pieces_around_a_text() -> None:
    for make, most, said in (
        (lambda count: template([TEXT, *[TOKEN] * (count - 1)]), 64, "1 times among 65 pieces"),
        (lambda count: template([TEXT], [0] * count), 64, "of at most 64 tokens each"),
        (lambda last: template([TEXT], [0, last]), SIZE - 1, "adds the id 100, expected 0 to 99"),
    ):
        takes(lambda number, make=make: check_steps(make(number), SIZE), most, said)  # type: ignore[misc]
    for single in ([], [TOKEN], [TEXT, TEXT], "Sequence", None, ["Sequence"]):
        with pytest.raises(ValueError, match="expected once"):
            check_steps(template(single), SIZE)
    # Anything else than a list of ids is left to the library, which must refuse it.
    check_steps(template([TEXT], None), SIZE)
    check_steps(template([TEXT], special_tokens=[1]), SIZE)
    check_steps(template([TEXT], special_tokens={"a": [1]}), SIZE)


def test_what_a_model_may_hold() -> None:
    def with_prefix(length: int) -> None:
        raw = msgspec.json.encode("x" * (length - 2))
        check_model({"continuing_subword_prefix": msgspec.Raw(raw)})

    takes(with_prefix, 256 * 6, r"model\.continuing_subword_prefix has 1537 bytes")
    long = msgspec.Raw(msgspec.json.encode("x" * 9999))
    check_model({"vocab": long, "merges": long})
    for kind in tokenizer_steps.MODELS:
        check_model({"type": msgspec.Raw(msgspec.json.encode(kind))})
    with pytest.raises(
        ValueError, match="expected BPE or Unigram or WordLevel or WordPiece"
    ) as caught:
        check_model({"type": msgspec.Raw(msgspec.json.encode("x" * 200))})
    assert "x" * 80 in str(caught.value)
    assert "x" * 81 not in str(caught.value)


@pytest.mark.parametrize("step", ["NFC", 3, [], {}, {"type": None}, {"type": "x" * 100}])
def test_what_is_no_step(step: object) -> None:
    found = "not in an object" if not isinstance(step, dict) else repr(step.get("type"))[:80]
    with pytest.raises(ValueError, match=f"normalizer.type is {found}, expected Sequence, Bert"):
        check_steps({"normalizer": step}, SIZE)
    steps = {"type": "Sequence"} | ({"normalizers": step} if step else {})
    with pytest.raises(ValueError, match=r"normalizer\.normalizers is not a list of steps"):
        check_steps({"normalizer": steps}, SIZE)


def test_the_number_of_steps_and_the_length_of_cuts() -> None:
    takes(
        lambda count: check_steps(in_sequence(*[{"type": "NFC"}] * count), SIZE),
        64,
        "normalizer has 65 steps, expected at most 64",
    )
    check_steps({"pre_tokenizer": {"type": "FixedLength", "length": 1}}, SIZE)
    for length in (0, -1, True, 1.0, "1"):
        with pytest.raises(ValueError, match=r"pre_tokenizer\.length is .*, expected at least 1"):
            check_steps({"pre_tokenizer": {"type": "FixedLength", "length": length}}, SIZE)
