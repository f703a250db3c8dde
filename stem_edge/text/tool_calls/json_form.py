"""Calls that are JSON objects."""

from __future__ import annotations

import json
from dataclasses import dataclass

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading
from stem_edge.text.tool_calls.lark import RuleNames, Schema, literal
from stem_edge.text.tool_calls.pieces import Pieces
from stem_edge.text.tool_calls.values import JSON, dumped, read_comma, read_text, read_value

ARGUMENTS = ("arguments", "parameters")  # models mix them up
BESIDE = ("id", "type")  # of no use here


@dataclass(frozen=True)
class JsonForm:
    """A JSON object with the name and, under `key`, the arguments, in either order."""

    key: str

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call; see Form."""
        name, early, told = "", "", False  # early: arguments that came before the name
        yield from text.expect("{")
        while True:
            yield from text.space()
            if (yield from text.skip("}")):
                break
            key = yield from _key(text)
            if key == "name" and not name:
                name = yield from _string(text)
            elif key in ARGUMENTS and not early and not told:
                early = yield from self._arguments(text, pieces, name)
                told = not early
            elif key in BESIDE:
                yield from read_value(text, list[str]().append, JSON)
            else:
                raise NoCallError
            if name and early:
                _tell(pieces, name, early)
                early, told = "", True
            yield from read_comma(text, "}")
        if not told:
            _tell(pieces, name, early or "{}")

    def _arguments(self, text: ArrivingText, pieces: Pieces, name: str) -> Reading[str]:
        """Take arguments; tell them as they arrive, or return them if that is too early."""
        begins = yield from text.peek()
        if begins == '"':  # as OpenAI has them: JSON in a text
            return _object((yield from _string(text)))
        if begins != "{":
            raise NoCallError
        parts = list[str]()
        if name:
            pieces.begin(name)
        yield from read_value(text, pieces.arguments if name else parts.append, JSON)
        if name:
            pieces.end()
        return "".join(parts)

    def call(self, rules: RuleNames, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        begin = literal(f'{{"name": "{name}", "{self.key}": ')
        return rules.add(f'{begin} {rules.json(schema)} "}}"')


def _key(text: ArrivingText) -> Reading[str]:
    key = yield from _string(text)
    yield from text.space()
    yield from text.expect(":")
    yield from text.space()
    return key


def _string(text: ArrivingText) -> Reading[str]:
    parts = list[str]()
    if not (yield from read_text(text, parts.append, JSON)):
        raise NoCallError
    return str(json.loads("".join(parts)))


def _object(text: str) -> str:
    try:
        arguments = json.loads(text)
        if isinstance(arguments, dict):
            return dumped(arguments)
    except (ValueError, RecursionError):
        pass
    raise NoCallError


def _tell(pieces: Pieces, name: str, arguments: str) -> None:
    pieces.begin(name)
    pieces.arguments(arguments)
    pieces.end()
