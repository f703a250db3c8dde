"""Forms of a call: how a function's name and its arguments are written between markers.

read takes a call from arriving text; call returns its rule, for required calls.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading
from stem_edge.text.tool_calls.lark import Rules, Schema, Values, literal
from stem_edge.text.tool_calls.pieces import Pieces
from stem_edge.text.tool_calls.values import (
    JSON,
    PYTHON,
    Syntax,
    escaped,
    read_comma,
    read_members,
    read_text,
    read_value,
)

IN_NAMES = frozenset(string.ascii_letters + string.digits + "_-.")
ARGUMENTS = ("arguments", "parameters")  # models mix them up
BESIDE = ("id", "type")  # of no use here
IN_CALLS = Syntax(quotes=PYTHON.quotes, bare_keys=True)
NEW_LINE = "\n"
END_OF_PARAMETER = "</parameter>"
UP_TO_END_OF_PARAMETER = r"/(?s:.*)<\/parameter>/"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Form(Protocol):
    """How a call is written."""

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call. Raises NoCallError where the text is none, or none any more."""

    def call(self, rules: Rules, name: str, schema: Schema) -> str:
        """Return the name of a rule for a call of this function; schema: of its arguments."""


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

    def call(self, rules: Rules, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        begin = literal(f'{{"name": "{name}", "{self.key}": ')
        return rules.add(f'{begin} {rules.json(schema)} "}}"')


@dataclass(frozen=True)
class PythonForm:
    """A call of a Python function with arguments by name."""

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call; see Form."""
        name = yield from text.while_in(IN_NAMES)
        if (yield from text.peek()) != "(":
            raise NoCallError
        pieces.begin(name)
        yield from read_members(text, pieces.arguments, IN_CALLS, ("(", "=", ")"))
        pieces.end()

    def call(self, rules: Rules, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        members = Values(rules, PYTHON, schema, spaced=True).members(schema, "=")
        return rules.add(f'{literal(name + "(")} {members} ")"')


@dataclass(frozen=True)
class BracesForm:
    """`call:name{key:value}` with a marker around texts instead of quotes, as Gemma writes it."""

    quote: str

    @property
    def _syntax(self) -> Syntax:
        return Syntax(raw_quote=self.quote, bare_keys=True)

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call; see Form."""
        yield from text.expect("call:")
        name = yield from text.while_in(IN_NAMES)
        if (yield from text.peek()) != "{":
            raise NoCallError
        pieces.begin(name)
        yield from read_members(text, pieces.arguments, self._syntax)
        pieces.end()

    def call(self, rules: Rules, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        members = Values(rules, self._syntax, schema, spaced=False).members(schema, ":")
        return rules.add(f'{literal(f"call:{name}{{")} {members} "}}"')


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
            pieces.arguments(f"{begin}{json.dumps(key)}: ")
            yield from text.skip("\n")
            if _is_text(pieces.schema(name, key)):
                yield from _tagged_text(text, pieces)
            else:
                value = yield from text.until(END_OF_PARAMETER)
                pieces.arguments(_json_of(value.removesuffix("\n")))
            begin = ", "
        pieces.arguments("}" if begin == ", " else "{}")
        pieces.end()

    def call(self, rules: Rules, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        body, required = "", schema.get("required", ())
        for key, value in (schema.get("properties") or {}).items():
            begin = literal(f"<parameter={key}>\n")
            optional = "" if key in required else "?"
            body += f" ({begin} {self._value(rules, schema, value)}){optional}"
        return rules.add(f'{literal(f"<function={name}>" + chr(10))}{body} "</function>"')

    def _value(self, rules: Rules, root: Schema, schema: object) -> str:
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
    choices = schema.get("enum", [schema["const"]] if "const" in schema else ())
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
    value = PYTHON_WORDS.get(value, value)
    try:
        return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


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
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise NoCallError


def _tell(pieces: Pieces, name: str, arguments: str) -> None:
    pieces.begin(name)
    pieces.arguments(arguments)
    pieces.end()
