"""The grammar of answers that are tool calls, in llguidance's dialect of Lark.

For JSON arguments, llguidance enforces the whole schema. For arguments in Gemma's format, the grammar enforces
`properties`, `required`, `type`, `items`, and scalars in `enum` and `const`. It ignores other keywords, such as
$ref, and allows any value there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stem_edge.errors import InputError
from stem_edge.text.tool_calls.families import Family
from stem_edge.text.tool_calls.reading import AFTER_WORDS

Tools = Sequence[Mapping[str, Any]]
OPEN = ("$ref", "anyOf", "oneOf", "allOf")  # keywords of schemas that describe properties elsewhere
# Spaces as in templates, so that models see what they saw in training. oneOf is treated as anyOf.
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
OPTIONS |= {"coerce_one_of": True}
SPECIAL = re.compile(r"<[^<>\s]+>")  # names of tokens that can stand in a grammar
MAX_DEPTH = 8  # of objects and lists in Gemma's form; deeper values may be any
SCALARS = {
    "string": "text",
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "boolean": '"true" | "false"',
    "null": '"null"',
}
VALUES = (
    f'value: {" | ".join(SCALARS.values())} | "[" (value ("," value)*)? "]" | "{{" pairs "}}"',
    'pairs: (pair ("," pair)*)?',
    'pair: /[a-zA-Z_][a-zA-Z0-9_]*/ ":" value',
)


def calls_grammar(
    family: Family, tools: Tools, *, name: str | None = None, parallel: bool = False
) -> str:
    """Return the grammar of answers that call these tools.

    name: the function that must be called; None for any. parallel: allow several calls.
    Raises InputError for a function that is not among the tools.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [each for each in functions if name in (None, each["name"])]
    if not chosen:
        known = ", ".join(each["name"] for each in functions)
        raise InputError(f"there is no tool {name!a}, expected one of: {known}")
    calls = " | ".join(f"call{n}" for n in range(len(chosen)))
    # If calls need no markers, the grammar has none, because models often leave them out.
    around = ("", "") if family.bare else (family.begin + family.inside, family.inside + family.end)
    begin, end = (_marks(family, text) for text in around)
    braces = _BracesRules(family) if family.quote else None
    lines = [
        f"start: one ({_marks(family, family.between)} one)*" if parallel else "start: one",
        f"one: {begin} ({calls}) {end}",
    ]
    for number, function in enumerate(chosen):
        name, schema = function["name"], _closed(function.get("parameters") or {})
        if braces is not None:
            body = f'{literal(f"call:{name}{{")} {braces.members(schema)} "}}"'
        else:
            opening = literal(f'{{"name": "{name}", "{family.key}": ')
            body = f'{opening} %json {json.dumps({**schema, "x-guidance": OPTIONS})} "}}"'
        lines.append(f"call{number}: {body}")
    return "\n".join([*lines, *(braces.lines if braces is not None else ())]) + "\n"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with additionalProperties false, unless it sets this or has $ref or anyOf."""
    if schema.keys() & OPEN:
        return schema
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def literal(text: str) -> str:
    """Return a text as a quoted string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _marks(family: Family, text: str) -> str:
    """Convert a text to Lark: special tokens in it match as tokens, the other parts as strings."""
    marks = "|".join(map(re.escape, family.special))
    parts = re.split(f"({marks})", text) if marks else [text]
    special = {part for part in family.special if SPECIAL.fullmatch(part)}
    return " ".join(part if part in special else literal(part) for part in parts if part)


class _BracesRules:
    """Builds Lark rules for calls in Gemma's format, and collects them in `lines`."""

    def __init__(self, family: Family) -> None:
        self._quote = _marks(family, family.quote)
        end = re.escape(family.quote).replace("/", r"\/")
        special = self._quote == family.quote
        self.lines = [
            f"text: {self._quote} /(?s:.*)/ {self._quote}"
            if special
            else f"text: {self._quote} end",
            *([] if special else [f"end[lazy]: /(?s:.*){end}/"]),
            *VALUES,
        ]

    def members(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """Return the Lark grammar of an object's members, sorted by name as in templates."""
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not properties or depth > MAX_DEPTH:
            return "" if schema.get("additionalProperties") is False else "pairs"
        needed = {key for key in properties if isinstance(required, list) and key in required}
        rest, begins = "", list[str]()  # alternatives for the first member, longest first
        for key in sorted(properties, reverse=True):
            member = self._rule(f"{_key(key)} {self._value(properties[key], depth + 1)}")
            begins = [f"{member} {rest}", *([] if key in needed else begins)]
            rest = self._rule(f'("," {member}){"" if key in needed else "?"} {rest}')
        return f"({' | '.join(begins)}){'' if needed else '?'}"

    def _rule(self, body: str) -> str:
        name = f"rule{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _value(self, schema: object, depth: int) -> str:
        if not isinstance(schema, Mapping):
            return "value"
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and not any(isinstance(each, list | dict) for each in options):
            return f"({' | '.join(map(self._written, options))})"
        kinds = schema.get("type", "object" if "properties" in schema else None)
        each = dict.fromkeys(str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds]))
        return f"({' | '.join(self._of_kind(kind, schema, depth) for kind in each)})"

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return f'"{{" {self.members(schema, depth)} "}}"'
        if kind == "array" and depth <= MAX_DEPTH:
            item = self._rule(self._value(schema.get("items"), depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        return SCALARS.get(kind, "value")

    def _written(self, value: object) -> str:
        if not isinstance(value, str):
            return literal(json.dumps(value))
        return f"{self._quote} {literal(value) if value else ''} {self._quote}"


def _key(name: str) -> str:
    """Return the Lark grammar of a key and a colon. The key gets quotes if it needs them."""
    return literal((literal(name) if AFTER_WORDS.intersection(name) else name) + ":")
