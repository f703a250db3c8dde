"""Values of arguments as families write them, read as JSON text while they arrive."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading

MAX_DEPTH = 64
LETTERS = frozenset(string.ascii_letters)
AFTER_KEYS = frozenset('=:,{}[]"<' + string.whitespace)
IN_NUMBERS = frozenset(string.digits) | set("+-.eE")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS |= {"True": "true", "False": "false", "None": "null"}
ESCAPES = frozenset('"\\/bfnrt')  # that JSON has, besides \u
HEX = frozenset(string.hexdigits)
Emit = Callable[[str], object]


@dataclass(frozen=True)
class Syntax:
    """How a family writes values, where that is not as in JSON.

    raw_quote: marker around a text in which nothing escapes; keys then stand without quotes, too.
    """

    raw_quote: str = ""


JSON = Syntax()


def read_value(text: ArrivingText, emit: Emit, syntax: Syntax, depth: int = 0) -> Reading[None]:
    """Take a value and emit its JSON as it arrives. Raises NoCallError for anything else."""
    if depth > MAX_DEPTH:
        raise NoCallError
    char = yield from text.peek()
    if (yield from read_text(text, emit, syntax)):
        return
    if char == "{":
        yield from read_members(text, emit, syntax, depth)
    elif char == "[":
        yield from _read_items(text, emit, syntax, depth)
    elif char in LETTERS:
        emit(_found(WORDS.get((yield from text.while_in(LETTERS)))))
    else:
        emit(_number((yield from text.while_in(IN_NUMBERS))))


def read_members(text: ArrivingText, emit: Emit, syntax: Syntax, depth: int = 0) -> Reading[None]:
    """Take an object."""
    yield from text.expect("{")
    emit("{")
    separator = ""
    while True:
        yield from text.space()
        if (yield from text.skip("}")):
            emit("}")
            return
        key = yield from _read_key(text, syntax)
        yield from text.space()
        yield from text.expect(":")
        yield from text.space()
        emit(f"{separator}{dumped(key)}: ")
        yield from read_value(text, emit, syntax, depth + 1)
        separator = ", "
        yield from read_comma(text, "}")


def _read_items(text: ArrivingText, emit: Emit, syntax: Syntax, depth: int) -> Reading[None]:
    yield from text.expect("[")
    emit("[")
    separator = ""
    while True:
        yield from text.space()
        if (yield from text.skip("]")):
            emit("]")
            return
        emit(separator)
        yield from read_value(text, emit, syntax, depth + 1)
        separator = ", "
        yield from read_comma(text, "]")


def read_comma(text: ArrivingText, end: str) -> Reading[None]:
    """Take a comma. Raises NoCallError if neither it nor the end comes next."""
    yield from text.space()
    if not (yield from text.skip(",")) and (yield from text.peek()) != end:
        raise NoCallError


def _read_key(text: ArrivingText, syntax: Syntax) -> Reading[str]:
    parts = list[str]()
    if (yield from read_text(text, parts.append, syntax)):
        return str(json.loads("".join(parts)))
    if not syntax.raw_quote:
        raise NoCallError
    while (char := (yield from text.peek())) and char not in AFTER_KEYS:
        parts.append((yield from text.take()))
    return _found("".join(parts))


def read_text(text: ArrivingText, emit: Emit, syntax: Syntax) -> Reading[bool]:
    """Take a text in quotes and emit it as JSON; return False, and take nothing, for others."""
    if syntax.raw_quote and (yield from text.skip(syntax.raw_quote)):
        emit('"')
        while not (yield from text.skip(syntax.raw_quote)):
            emit(escaped((yield from text.take())))
        emit('"')
        return True
    if not (yield from text.skip('"')):
        return False
    emit('"')
    while (char := (yield from text.take())) != '"':
        emit((yield from _read_escape(text)) if char == "\\" else escaped(char))
    emit('"')
    return True


def _read_escape(text: ArrivingText) -> Reading[str]:
    char = yield from text.take()
    digits = {"u": 4, "x": 2}.get(char)
    if digits is None:
        # As Python has it: a backslash that escapes nothing is one, but a quote loses it.
        return f"\\{char}" if char in ESCAPES else "'" if char == "'" else f"\\\\{escaped(char)}"
    code = ""
    for _ in range(digits):
        code += yield from text.take()
    if not HEX.issuperset(code):
        raise NoCallError
    return f"\\u{code:0>4}"


def dumped(value: object) -> str:
    """Return a value as JSON. Raises ValueError for infinity and NaN, which JSON has not.

    In ASCII, because half of a surrogate pair, which an escape can stand for, cannot be sent otherwise.
    """
    return json.dumps(value, allow_nan=False)


def escaped(text: str) -> str:
    """Return text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(text: str) -> str:
    if NUMBER.fullmatch(text):
        return text
    try:
        return dumped(float(text))  # such as .5
    except ValueError:
        raise NoCallError from None


def _found(text: str | None) -> str:
    if not text:
        raise NoCallError
    return text
