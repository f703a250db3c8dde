"""What a user sets for choosing tokens, and what is refused."""

from typing import Any

import pytest

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.sampling_params import SamplingParams, params_of


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
