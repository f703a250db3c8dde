"""What a user sets for choosing tokens, and what is refused."""

from typing import Any

import pytest

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.sampling_params import SamplingParams, params_of

INF = float("inf")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (
            "max_new_tokens",
            0,
            "a whole number from 1 to 2147483647; a large number fills the context",
        ),
        ("temperature", INF, "a number from 0.0 to 1000000.0"),
        ("top_p", 0.0, "a number above 0, up to 1.0"),
        ("stop", ["END", ""], "a list of at most 64 texts of 1 to 1024 characters"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any, expected: str) -> None:
    """The words are exactly these; tests/faults/text/test_prompts.py has more values."""
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == f"{field} is {value!r}; expected {expected}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.0),
        ({"seed": 1, "repetition_penalty": 1.5}, 0.0),
        ({"top_k": 3}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"top_k": 3, "temperature": 0.0}, 0.0),
    ],
)
def test_what_chooses_among_tokens_turns_sampling_on(
    options: dict[str, Any], expected: float
) -> None:
    assert SamplingParams(**options).resolved().temperature == expected


OPTIONS: list[tuple[Any, Grammar | None]] = [
    ({}, None),
    ({"schema": None, "grammar": None}, None),
    ({"schema": {"type": "null"}}, Grammar("json_schema", '{"type":"null"}')),
    ({"schema": False}, Grammar("json_schema", "false")),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    (
        {"schema": '{ "b": 1, "a": [true], "c": "é" }'},
        Grammar("json_schema", '{"b":1,"a":[true],"c":"é"}'),
    ),
    ({"grammar": '// b ::= c\nstart: "a ::= b"'}, Grammar("lark", '// b ::= c\nstart: "a ::= b"')),
    ({"grammar": '# yes\n  root-2  ::=\n "a"'}, Grammar("gbnf", '# yes\n  root-2  ::=\n "a"')),
    ({"grammar": Grammar("regex", "a")}, Grammar("regex", "a")),
]


@pytest.mark.parametrize(("options", "grammar"), OPTIONS)
def test_grammars_of_options(options: Any, grammar: Grammar | None) -> None:
    assert params_of(None, {"top_k": 3} | options) == SamplingParams(top_k=3, grammar=grammar)


def test_one_grammar_at_most() -> None:
    with pytest.raises(InputError, match="only one of grammar and regex"):
        params_of(None, {"regex": "a", "grammar": "b"})
