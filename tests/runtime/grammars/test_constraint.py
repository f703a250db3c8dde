"""Constraints of answers: what is allowed, forced and ended; grammars are compiled once."""

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from random_writing import EOS_IDS, VOCAB_SIZE, allows, demo_codec, demo_grammars, write

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.constraint import GrammarConstraint, Grammars
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.text.codec import TextRoom
from stem_edge.system.memory import own_memory


def allowed_ids(constraint: GrammarConstraint) -> set[int]:
    logits = np.zeros(VOCAB_SIZE, np.float32)
    constraint.mask(logits)
    return {int(token) for token in np.flatnonzero(logits == 0)}


def id_of(text: str) -> int:
    (token,) = demo_codec().encode(text, add_special_tokens=False)
    return token


def test_what_is_allowed_keeps_its_logits() -> None:
    logits = np.random.default_rng(0).standard_normal(VOCAB_SIZE).astype(np.float32)
    before = logits.copy()
    demo_grammars().open(Grammar.of_regex("[ab]x")).mask(logits)
    kept = np.flatnonzero(np.isfinite(logits))
    assert {int(token) for token in kept} >= {id_of("a"), id_of("b")}
    assert {demo_codec().decode([int(token)])[0] for token in kept} == {"a", "b"}
    np.testing.assert_array_equal(logits[kept], before[kept])
    assert np.isneginf(np.delete(logits, kept)).all()


def test_every_end_is_allowed_once_the_grammar_is_complete() -> None:
    constraint = demo_grammars().open(Grammar.of_regex("xy?"))
    assert allowed_ids(constraint).isdisjoint(EOS_IDS) and not constraint.ended
    constraint.accept(id_of("x"))
    assert allowed_ids(constraint) == {id_of("y"), *EOS_IDS} and not constraint.ended
    constraint.accept(id_of("y"))
    assert constraint.ended and allowed_ids(constraint) == set(EOS_IDS)
    assert constraint.forced(8) == []
    constraint.accept(EOS_IDS[1])
    assert constraint.ended


def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    text = '{"country": "Liechtenstein", "capital": "Vaduz"}'
    constraint = demo_grammars().open(Grammar.of_regex(re.escape(text) + "[0-9]"))
    ids = demo_codec().encode(text, add_special_tokens=False)
    assert constraint.forced(3) == ids[:3] and constraint.forced(0) == []
    forced = constraint.forced(1000)
    assert forced == constraint.forced(1000)  # nothing is accepted yet
    assert len(forced) >= len(ids) - 1 and forced == ids[: len(forced)]
    for token in forced:
        assert token in allowed_ids(constraint)
        constraint.accept(token)
    assert constraint.forced(8) == [] or len(forced) < len(ids)


def test_a_long_text_that_must_follow_is_split_in_parts() -> None:
    """All at once, a codec without room refuses it, and its error in the library takes 40 MB for good."""
    codec = demo_codec.__wrapped__()  # of its own, because the other one is shared
    constraint = Grammars(codec, EOS_IDS, VOCAB_SIZE).open(Grammar.of_regex("a{100000}b"))
    codec.room = TextRoom(0, own_memory() + 40_000_000)  # after the library of grammars is loaded
    forced = constraint.forced(9)
    assert forced and set(codec.decode(forced)) == {"a"}


def test_a_token_that_may_not_follow_is_refused() -> None:
    constraint = demo_grammars().open(Grammar.of_regex("xy"))
    with pytest.raises(InputError, match="cannot go on by its grammar"):
        constraint.accept(id_of("y"))


def test_a_grammar_that_has_become_too_large_is_not_kept() -> None:
    """Its states take 100 MB, and copies share them."""
    grammars = Grammars(demo_codec(), EOS_IDS, VOCAB_SIZE)
    constraint = grammars.open(Grammar.of_regex("(?i)(?:abc)*" * 500))
    assert len(grammars._compiled) == 1
    with pytest.raises(InputError, match="too many expressions"):
        for _ in range(40):
            constraint.accept(min(allowed_ids(constraint) - set(EOS_IDS)))
    assert not grammars._compiled


class Panic(BaseException):
    """As llguidance's, no Exception."""


class Panicking:
    """A matcher of which every method panics."""

    def __getattr__(self, name: str) -> object:
        raise Panic(f"{name}: index out of range\n<backtrace>")


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.mask(np.zeros(9, np.float32)), lambda it: it.accept(1), lambda it: it.forced(1),
        lambda it: it.ended,
    ],
)  # fmt: skip
def test_panics_are_refused(call: Callable[[GrammarConstraint], object]) -> None:
    matcher: Any = Panicking()
    with pytest.raises(InputError, match=r"by its grammar \(\w+: index out of range\); give"):
        call(GrammarConstraint(matcher, 9, lambda: None))


def test_special_tokens_follow_only_where_a_grammar_names_them() -> None:
    anything = allowed_ids(demo_grammars().open(Grammar.of_regex("(?s:.)*")))
    assert max(anything - set(EOS_IDS)) < 1500 and len(anything) > 1400
    named = Grammar.of_text("start: <|fim_prefix|> /[a-z]+/ <[1503]>")
    assert allows(named, "<|fim_prefix|>abc<|fim_middle|>", special=True)
    assert not allows(named, "<|fim_prefix|>abc", special=True)
    spelled = Grammar.of_schema({"const": "<|fim_prefix|>"})
    assert not allows(spelled, '"<|fim_prefix|>"', special=True)
    assert allows(spelled, '"<|fim_prefix|>"') and len(demo_grammars().open(spelled).forced(9)) > 3
    with pytest.raises(InputError, match=r"unknown special token: .<\|no_such_token\|>"):
        demo_grammars().open(Grammar.of_text("start: <|no_such_token|>"))


# Regular expression, as Python reads it too.
@pytest.mark.parametrize(
    "regex",
    [
        "[a-z]{3,5}-[0-9]{2}", "(yes|no|maybe)( (yes|no))?", r"[0-9]{3}\s[A-Z]\.", "(?i)abc", "[^a]{2}b",
        "é+ü?", r'"[^"\\]*"', "a{2}|b{3,}c", r"\{\}\[\]/\\", "x?", "(?s:.{3})",
    ],
)  # fmt: skip
def test_regular_expressions(regex: str) -> None:
    texts = [write(demo_grammars().open(Grammar.of_regex(regex)), seed) for seed in range(10)]
    written = [text for text in texts if text is not None]
    assert len(written) > 5
    assert [text for text in written if not re.fullmatch(regex, text)] == []


@pytest.mark.parametrize(
    "grammar, message",
    [
        (Grammar.of_regex("(?=a)b"), "look-ahead"),
        (Grammar.of_regex(r"(a)\1"), "backreferences"),
        (Grammar.of_regex("a)"), "regex"),
        (Grammar.of_regex("(" * 10_000 + ")" * 10_000), "regex"),
        (Grammar.of_regex("[a-z]*" * 1000), "regex: "),
        (Grammar.of_regex("[a-z]*" * 5000), "regex has 30,000 characters"),
        (Grammar.of_text("start: " + '"a"? ' * 10_000), "has more than 32,768 characters"),
        (Grammar.of_text("start: a"), "lark: "),
        (Grammar.of_text("x: 'a'"), "lark: "),
        (Grammar.of_text("start: " + "(" * 5000 + '"a"' + ")" * 5000), "lark: .*deep"),
        (Grammar.of_text("start: %json {"), "after %json is no JSON"),
        (Grammar.of_text('start: %json {"uniqueItems": true}'), "uniqueItems"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammar: Grammar, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        demo_grammars().open(grammar)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "loop",
    [
        Grammar.of_schema({"$ref": "#"}), Grammar.of_schema({"anyOf": [{"$ref": "#"}]}),
        Grammar.of_text("start: start"), Grammar.of_text("start: a\na: b\nb: a"),
        Grammar.of_text("root ::= root"), Grammar.of_regex(r"[^\s\S]"),
    ],
)  # fmt: skip
def test_what_leads_only_back_to_itself_is_refused(loop: Grammar) -> None:
    with pytest.raises(InputError, match=r"(?i)no text matches|unsatisfiable|cannot"):
        demo_grammars().open(loop)


def test_long_chains_of_rules() -> None:
    """The library follows them by recursion, which ended the process."""
    rules = "".join(f'\na{n}: "x" a{n + 1}' for n in range(1900))
    assert demo_grammars().open(Grammar.of_text(f'start: a0{rules}\na1900: "y"')).forced(9)
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {}]} for n in range(2690)}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions | {"d2690": {"type": "null"}}}
    assert allows(Grammar.of_schema(schema), "null")


def test_a_grammar_without_an_end_stops_the_answer() -> None:
    with pytest.raises(InputError, match="by its grammar"):
        allows(Grammar.of_text('start: "a" start'), "aaaa")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'stem-edge\[grammar\]'"):
        Grammars(demo_codec(), EOS_IDS, VOCAB_SIZE).open(Grammar.of_regex("a"))
