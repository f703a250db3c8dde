"""Reading of one call while it arrives: the name, and the arguments as JSON text."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading
from stem_edge.text.tool_calls.pieces import Pieces

MAX_DEPTH = 64
IN_NAMES = frozenset(string.ascii_letters + string.digits + "_-.")
AFTER_WORDS = frozenset('=:,{}[]"<' + string.whitespace)
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS |= {"True": "true", "False": "false", "None": "null"}
ESCAPES = frozenset('"\\/bfnrtu')
ARGUMENTS = ("arguments", "parameters")  # models mix them up
Emit = Callable[[str], object]


def read_braces_call(text: ArrivingText, pieces: Pieces, quote: str) -> Reading[None]:
    """Take `call:name{key:value}` with `quote` around strings. Raises NoCallError for anything else."""
    yield from text.expect("call:")
    name = yield from text.while_in(IN_NAMES)
    if (yield from text.peek()) != "{":
        raise NoCallError
    yield from _stream_arguments(text, pieces, name, quote)


def read_json_call(text: ArrivingText, pieces: Pieces) -> Reading[None]:
    """Take a JSON object with a name and arguments, in either order. Raises NoCallError."""
    name, early, complete = "", "", False  # early: arguments that came before the name
    yield from text.expect("{")
    while not (yield from _closes(text)):
        key = yield from _read_key(text)
        if key == "name" and not name:
            name = yield from _read_string(text)
        elif key in ARGUMENTS and not early and not complete:
            if (yield from text.peek()) != "{":
                raise NoCallError
            if name:
                yield from _stream_arguments(text, pieces, name)
                complete = True
            else:
                early = yield from _read_object(text, lambda _: None)
        elif key in ("id", "type"):
            yield from _read_string(text)
        else:
            raise NoCallError
    if not complete:
        pieces.begin(name)
        pieces.arguments(early or "{}")
        pieces.end()


def _stream_arguments(
    text: ArrivingText, pieces: Pieces, name: str, quote: str = ""
) -> Reading[None]:
    pieces.begin(name)
    yield from _read_object(text, pieces.arguments, quote)
    pieces.end()


def _read_object(text: ArrivingText, emit: Emit, quote: str = "") -> Reading[str]:
    """Take an object, emit it as JSON while it arrives, and return it. Raises NoCallError if it is none."""
    parts, depth, comma = list[str](), 0, ""

    def write(part: str) -> None:
        parts.append(part)
        emit(part)

    while depth or not parts:
        yield from text.space()
        if (yield from text.skip(",")):
            comma = (
                ", "  # written with the next value, because models put commas behind the last one
            )
            continue
        char = yield from text.peek()
        if comma and char not in ("}", "]"):
            write(comma)
        comma = ""
        if char in ("{", "[", "}", "]", ":"):
            depth += {"{": 1, "[": 1, ":": 0}.get(char, -1)
            write((yield from text.take()) + " " * (char == ":"))
        elif not (yield from _read_quoted(text, write, quote)):
            write((yield from _read_word(text, keys=bool(quote))))
        if depth > MAX_DEPTH:
            raise NoCallError
    _check(whole := "".join(parts))
    return whole


def _check(arguments: str) -> None:
    try:
        json.loads(arguments)
    except ValueError:
        raise NoCallError from None


def _read_quoted(text: ArrivingText, emit: Emit, quote: str = "") -> Reading[bool]:
    """Take a string and emit it as JSON; return False, and take nothing, for anything else."""
    if quote and (yield from text.skip(quote)):  # nothing escapes in it
        emit('"')
        while not (yield from text.skip(quote)):
            emit(_escaped((yield from text.take())))
        emit('"')
        return True
    if not (yield from text.skip('"')):
        return False
    emit('"')
    while (char := (yield from text.take())) != '"':
        emit(_escape((yield from text.take())) if char == "\\" else _escaped(char))
    emit('"')
    return True


def _escape(char: str) -> str:
    """Return an escape as JSON. As in Python, a backslash that escapes nothing stands for itself."""
    return f"\\{char}" if char in ESCAPES else "'" if char == "'" else f"\\\\{_escaped(char)}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_word(text: ArrivingText, *, keys: bool) -> Reading[str]:
    """Take a number, true, false, null, or a key without quotes where there are such."""
    taken = list[str]()
    while (char := (yield from text.peek())) and char not in AFTER_WORDS:
        taken.append((yield from text.take()))
    word = "".join(taken)
    yield from text.space()
    if keys and word and (yield from text.begins(":")):
        return json.dumps(word, ensure_ascii=False)
    if word in WORDS:
        return WORDS[word]
    if NUMBER.fullmatch(word):
        return word
    try:
        return json.dumps(float(word), allow_nan=False)  # such as .5
    except ValueError:
        raise NoCallError from None


def _closes(text: ArrivingText) -> Reading[bool]:
    """Take the end of an object, or what is between two members."""
    yield from text.space()
    yield from text.skip(",")
    yield from text.space()
    return (yield from text.skip("}"))


def _read_key(text: ArrivingText) -> Reading[str]:
    key = yield from _read_string(text)
    yield from text.space()
    yield from text.expect(":")
    yield from text.space()
    return key


def _read_string(text: ArrivingText) -> Reading[str]:
    parts = list[str]()
    if not (yield from _read_quoted(text, parts.append)):
        raise NoCallError
    try:
        return str(json.loads("".join(parts)))
    except ValueError:
        raise NoCallError from None
