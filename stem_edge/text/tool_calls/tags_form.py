"""Calls with a tag around each argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from stem_edge.text.tool_calls.arriving import ArrivingText, Reading
from stem_edge.text.tool_calls.lark import RuleNames, Schema, literal
from stem_edge.text.tool_calls.pieces import Pieces
from stem_edge.text.tool_calls.values import WORDS, dumped, escaped

NEW_LINE = "\n"
END_OF_PARAMETER = "</parameter>"
UP_TO_END_OF_PARAMETER = r"/(?s:.*)<\/parameter>/"


@dataclass(frozen=True)
class TagsForm:
    """`<function=name>` with a `<parameter=key>` around each value: a plain text, or else JSON."""

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call; see Form."""
        yield from text.expect("<function=")
        name = (yield from text.until(">")).strip()
        pieces.begin(name)
        begin = "{"
        while True:
            yield from text.space()
            if (yield from text.skip("</function>")):
                break
            yield from text.expect("<parameter=")
            key = (yield from text.until(">")).strip()
            pieces.arguments(f"{begin}{dumped(key)}: ")
            yield from text.skip("\n")
            if _is_text(pieces.schema(name, key)):
                yield from _tagged_text(text, pieces)
            else:
                value = yield from text.until(END_OF_PARAMETER)
                pieces.arguments(_json_of(value.removesuffix("\n")))
            begin = ", "
        pieces.arguments("}" if begin == ", " else "{}")
        pieces.end()

    def call(self, rules: RuleNames, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        body, required = "", schema.get("required", ())
        for key, value in (schema.get("properties") or {}).items():
            begin = literal(f"<parameter={key}>\n")
            optional = "" if key in required else "?"
            body += f" ({begin} {self._value(rules, schema, value)}){optional}"
        return rules.add(f'{literal(f"<function={name}>" + chr(10))}{body} "</function>"')

    def _value(self, rules: RuleNames, root: Schema, schema: object) -> str:
        end = f"\n{END_OF_PARAMETER}\n"
        given = schema if isinstance(schema, Mapping) else {}
        choices = given.get("enum", [given["const"]] if "const" in given else ())
        if _is_text(given) and choices:
            return rules.add(" | ".join(literal(each + end) for each in choices))
        if _is_text(given):
            # Up to the first end of a parameter, in a line of its own or not, as it is read.
            return rules.add(f"{rules.lazy(UP_TO_END_OF_PARAMETER)} {literal(NEW_LINE)}")
        defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return rules.add(f"{rules.json({**defined, **given})} {literal(end)}")


def _is_text(schema: Schema) -> bool:
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(choices, list):  # an unchecked schema
        return False
    if choices:
        return all(isinstance(each, str) for each in choices)
    return schema.get("type") == "string"


def _tagged_text(text: ArrivingText, pieces: Pieces) -> Reading[None]:
    pieces.arguments('"')
    while not (yield from text.skip(f"\n{END_OF_PARAMETER}")):
        if (yield from text.skip(END_OF_PARAMETER)):
            break
        pieces.arguments(escaped((yield from text.take())))
    pieces.arguments('"')


def _json_of(value: str) -> str:
    """Return the JSON of a value whose type is not known, a text if it is nothing else."""
    value = WORDS.get(value, value)
    try:
        return dumped(json.loads(value))
    except (ValueError, RecursionError):
        return dumped(value)
