"""Refuses JSON Schemas that llguidance would enforce wrongly, or with minutes of computation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.library import MAX_LARK, MAX_LINKS, MAX_REGEX
from stem_edge.shown import one_line, shown

# Allow a space, or a line break with indentation, wherever JSON allows whitespace. Models write this.
# If more is allowed, a model may write nothing but whitespace until the answer's limit.
WHITESPACE = r" |\n[ \t]{0,40}"
OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": False}
# The automaton has a state for each remainder: the least common multiple of all multipleOf values.
MAX_MULTIPLE = 10_000
MAX_PAIRS = 90_000  # pairs of patternProperties, because llguidance compares all pairs
_JSON = re.compile(r"%json\s*+")


def prepared(text: str) -> str:
    """Check a JSON Schema; return it as JSON text. A schema that is a bool becomes {"allOf": [bool]}.

    Raises InputError, naming the keyword, for keywords that llguidance enforces wrongly or too slowly.
    """
    schema = json.loads(text)
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    _check(schema)
    return json.dumps(schema, ensure_ascii=False)


def check_lark(lark: str) -> None:
    """Raise InputError if a Lark grammar is too long, or a JSON Schema in it is refused or malformed."""
    at = size = 0
    while found := _JSON.search(lark, at):
        size += found.end() - at
        try:
            schema, at = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError) as error:
            raise InputError(f"lark: after %json is no JSON ({one_line(error)})") from None
        _check(schema)
    size += len(lark) - at
    if size > MAX_LARK:
        raise InputError(
            f"the grammar has more than {MAX_LARK:,} characters, as Lark and without schemas; "
            "write a shorter one"
        )


def _check(root: Any) -> None:
    multiple, pairs, links = 1, 0, 0
    for schema in _objects(root):
        links += "$ref" in schema
        named = schema.get("patternProperties")
        patterns = list(named) if isinstance(named, dict) else []
        pairs += len(patterns) ** 2
        value = schema.get("multipleOf")
        if isinstance(value, int | float) and value > 0:  # zeros at its end cost nothing
            digits = f"{Decimal(str(value)):f}".replace(".", "").strip("0")
            multiple = lcm(multiple, int(digits or "1"))
        _refuse(multiple > MAX_MULTIPLE, f"multipleOf {shown(value)} takes too long to enforce")
        _refuse(pairs > MAX_PAIRS, "patternProperties are too many")
        _refuse(links > MAX_LINKS, f"has more than {MAX_LINKS:,} times $ref")
        for pattern in (schema.get("pattern"), *patterns):
            long = isinstance(pattern, str) and len(pattern) > MAX_REGEX
            _refuse(long, f"a pattern has more than {MAX_REGEX:,} characters")
        least, required = schema.get("minProperties"), schema.get("required")
        count = len(required) if isinstance(required, list) else 0
        # A model may write a name that is not required twice, so only one such property is certain.
        free = isinstance(least, int) and least > count + 1
        _refuse(
            free, f"minProperties {shown(least)} is more than one above the required properties"
        )


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise InputError(f"schema: {what}; write it in another way, or leave it out")


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all JSON objects in a JSON value, at any depth."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            yield node
        if isinstance(node, dict | list):
            nodes.extend(node.values() if isinstance(node, dict) else node)
