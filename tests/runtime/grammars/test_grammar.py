"""Grammars as users write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import MAX_CHARS, Grammar


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
