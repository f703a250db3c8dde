"""Grammars as users write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import MAX_CHARS, Grammar


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (Grammar.of_schema({"b": 1, "a": [True]}), "json_schema", '{"b":1,"a":[true]}'),
        (Grammar.of_schema('{ "b": 1,\n "a": [true] }'), "json_schema", '{"b":1,"a":[true]}'),
        (Grammar.of_schema({"const": "é"}), "json_schema", '{"const":"é"}'),
        (Grammar.of_schema(True), "json_schema", "true"),
        (Grammar.of_regex("a|b"), "regex", "a|b"),
        (Grammar.of_text('root ::= "a" | "b"'), "gbnf", 'root ::= "a" | "b"'),
        (Grammar.of_text('# yes\n\n  root-2  ::=\n "a"'), "gbnf", '# yes\n\n  root-2  ::=\n "a"'),
        (Grammar.of_text('start: "a ::= b"'), "lark", 'start: "a ::= b"'),
        (Grammar.of_text("// a ::= b\nstart: /./"), "lark", "// a ::= b\nstart: /./"),
    ],
)
def test_kind_and_text(made: Grammar, kind: str, text: str) -> None:
    assert (made.kind, made.text) == (kind, text)


@pytest.mark.parametrize(
    ("make", "value", "words"),
    [
        (Grammar.of_schema, "{", "schema is not JSON"),
        (Grammar.of_schema, {"a": object()}, "schema is not JSON"),
        (Grammar.of_schema, {"a": float("nan")}, "schema is not JSON"),
        (Grammar.of_schema, "[" * 100_000, "schema is not JSON"),
        (Grammar.of_schema, [1], "expected a JSON object, true or false"),
        (Grammar.of_regex, "", "^regex is"),
        (Grammar.of_regex, None, "regex is None"),
        (Grammar.of_text, "a" * (MAX_CHARS + 1), "expected a text of 1 to"),
        (Grammar.of_text, 3, "grammar is 3"),
    ],
)
def test_refused(make: Callable[[object], Grammar], value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(value)
