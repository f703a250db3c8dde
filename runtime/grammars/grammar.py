"""Grammars as users write them. A grammar describes the texts that an answer may be."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, Self

from stem_edge.errors import InputError
from stem_edge.shown import one_line, shown

MAX_CHARS = 1 << 17  # larger ones take minutes or 100 MB to compile
# Lark has no "::=". Possessive, so that time grows with the length alone.
_GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)


@dataclass(frozen=True)
class Grammar:
    """A description of the texts that an answer may be. It is validated when it is compiled.

    Raises InputError if its text is empty or too long.
    """

    kind: Literal["json_schema", "regex", "lark", "gbnf"]  # language of the text
    text: str  # at most MAX_CHARS

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not 0 < len(self.text) <= MAX_CHARS:
            option = {"json_schema": "schema", "regex": "regex"}.get(self.kind, "grammar")
            raise InputError(
                f"{option} is {shown(self.text)}; expected a text of 1 to {MAX_CHARS:,} characters"
            )

    @classmethod
    def of_schema(cls, schema: object) -> Self:
        """Return the grammar of the JSON texts that a JSON Schema allows.

        schema: a dict or bool, or JSON as a str. Answers have members in the order of the schema's properties.
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"schema is not JSON ({one_line(error)}); give a JSON Schema"
            ) from None
        if not isinstance(value, dict | bool):
            raise InputError(f"schema is {shown(text)}; expected a JSON object, true or false")
        return cls("json_schema", text)

    @classmethod
    def of_regex(cls, regex: str) -> Self:
        """Return the grammar of texts that a regular expression matches in full."""
        return cls("regex", regex)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the grammar that a text in Lark or GBNF describes; a text with "::=" is GBNF."""
        lark = cls("lark", text)  # refuses what is too long to search
        return cls("gbnf", text) if _GBNF_RULE.search(text) else lark


def grammar_of(grammar: Grammar | str | None, schema: object, regex: str | None) -> Grammar | None:
    """Return the Grammar that one of the options sets; None if all are None. Raises InputError for two."""
    options = {"grammar": grammar, "schema": schema, "regex": regex}
    named = [name for name, value in options.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"an answer has one grammar; give only one of {' and '.join(named)}")
    if schema is not None:
        return Grammar.of_schema(schema)
    if regex is not None:
        return Grammar.of_regex(regex)
    return Grammar.of_text(grammar) if isinstance(grammar, str) else grammar
