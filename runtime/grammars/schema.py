"""JSON Schemas as llguidance reads them, and Lark in its dialect, with schemas and special tokens inside.

It refuses by itself what it does not enforce. This module refuses what it would enforce wrongly, or so slowly
that a request could stop a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from stem_edge.errors import InputError
from stem_edge.files.strict_json import one_line
from stem_edge.runtime.grammars.library import MAX_LARK, MAX_LINKS, MAX_REGEX
from stem_edge.shown import shown

# A space, or a line break with indentation, wherever JSON allows any: models write so, and a model
# that is allowed more may write nothing else until the answer's limit.
WHITESPACE = r" |\n[ \t]{0,40}"
OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": False}

# Remainders are states of an automaton: as many as the common multiple of a schema's multiples.
# A million take 14 seconds to compile. Zeros at the end of a number cost nothing.
MAX_MULTIPLE = 10_000
MAX_PAIRS = 90_000  # of patterns, which takes 3 s

_VALUES = ("const", "enum", "default", "example", "examples")  # not schemas
_NAMED = (  # maps of names to schemas
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
)  # fmt: skip


def prepared(text: str) -> str:
    """Return a JSON Schema in the form of an object.

    Raises InputError, naming keyword and place, for what llguidance would enforce wrongly or too slowly.
    """
    schema = json.loads(text)
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    _check_totals(schema)
    for each, where in _schemas(schema, "#"):
        _check(each, where)
    made = json.dumps(schema, ensure_ascii=False)
    if made.count('"$ref"') > MAX_LINKS:
        raise InputError(f"schema: has more than {MAX_LINKS:,} times $ref; write a shorter one")
    return made


def _schemas(node: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a schema and each schema in it, with its place."""
    if isinstance(node, list):
        for at, each in enumerate(node):
            yield from _schemas(each, f"{where}/{at}")
    if not isinstance(node, dict):
        return
    yield node, where
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            for name, each in value.items():
                yield from _schemas(each, f"{where}/{key}/{name}")
        elif key not in _VALUES:
            yield from _schemas(value, f"{where}/{key}")


def _check(schema: dict[str, Any], where: str) -> None:
    if "x-guidance" in schema:
        raise InputError(f"schema: x-guidance at {where} is no part of JSON Schema; remove it")
    by_pattern = schema.get("patternProperties")
    names: list[object] = list(by_pattern) if isinstance(by_pattern, dict) else []
    patterns = [schema.get("pattern"), *names]
    if any(isinstance(pattern, str) and len(pattern) > MAX_REGEX for pattern in patterns):
        raise InputError(
            f"schema: a pattern at {where} has more than {MAX_REGEX:,} characters; shorten it"
        )
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:  # names that are free may be written twice
        raise InputError(
            f"schema: minProperties {shown(least)} at {where} is more than one above the count of "
            "required properties, which cannot be enforced; require more, or ask for fewer"
        )


def _check_totals(root: Any) -> None:
    """Refuse what takes long together: multiples, and patterns, which are compared in pairs."""
    multiple, pairs = 1, 0
    for schema, where in _schemas(root, "#"):
        value, patterns = schema.get("multipleOf"), schema.get("patternProperties")
        if isinstance(value, int | float) and value > 0:
            digits = f"{Decimal(str(value)):f}".replace(".", "").strip("0")
            multiple = lcm(multiple, int(digits or "1"))
        pairs += len(patterns) ** 2 if isinstance(patterns, dict) else 0
        if multiple > MAX_MULTIPLE:
            raise InputError(
                f"schema: multipleOf {shown(value)} at {where} takes too long to enforce; expected "
                f"digits of which the common multiple is at most {MAX_MULTIPLE:,}"
            )
        if pairs > MAX_PAIRS:
            raise InputError(f"schema: patternProperties at {where} are too many; remove some")


# Texts, regular expressions and comments first: what is in them is neither schema nor token. They are
# split as llguidance splits them, which refuses a text that is not closed in its line, and a regular
# expression that is not closed at all. Possessive, so that time grows with the length alone.
_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|/(?!/)(?:\\.|[^/\\])++/?|(?://|\#)[^\n]*+'
    r"|(?P<json>%json\s*+)|(?P<token><[^<>\s\[\]]++>)"
)


def prepared_lark(lark: str, special_ids: Mapping[str, int]) -> str:
    """Return a Lark grammar with its schemas, after %json, prepared as a Grammar's own are.

    Special tokens, such as <|python_tag|>, are written by number. Raises InputError for a schema that
    is not JSON, and for a token that does not exist.
    """
    written, at, size = [], 0, 0
    while found := _PART.search(lark, at):
        written.append(lark[at : found.start()])
        size += found.end() - at
        at = found.end()
        _check_size(size)
        if found["token"] is not None:
            written.append(f"<[{_id_of(found['token'], special_ids)}]>")
            continue
        written.append(found[0])
        if found["json"] is not None:
            try:
                given, end = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError) as error:
                raise InputError(f"lark: after %json is no JSON ({one_line(error)})") from None
            # In Lark, a schema may say which spaces it has; never that its rules are not kept.
            told = given.pop("x-guidance", None) if isinstance(given, dict) else None
            options = {**(told if isinstance(told, dict) else OPTIONS), "lenient": False}
            schema = json.loads(prepared(json.dumps(given)))
            made = json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)
            # With as many lines as before, so that errors name lines of what was given.
            written.append("\n" * lark.count("\n", at, end) + made)
            at = end
    _check_size(size + len(lark) - at)
    return "".join(written) + lark[at:]


def _check_size(size: int) -> None:
    if size > MAX_LARK:
        raise InputError(
            f"the grammar has more than {MAX_LARK:,} characters, as Lark and without schemas; "
            "write a shorter one"
        )


def _id_of(name: str, special_ids: Mapping[str, int]) -> int:
    if name not in special_ids:
        known = ", ".join(list(special_ids)[:8])
        raise InputError(f"the grammar names {shown(name)}; special tokens are {known}, ...")
    return special_ids[name]
