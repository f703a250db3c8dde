"""Parses one tool call in an answer's text: its name, and its arguments as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from stem_edge.text.thoughts import SPACE

MAX_DEPTH = 64
AFTER_WORDS = frozenset('=:,{}[]"<' + " \t\n\r\x0b\x0c")
ARGUMENTS = ("arguments", "parameters")  # models mix them up
KEYS = {"name", "id", "type", *ARGUMENTS}
# The beginning of a call in Gemma's form, and a text that may become one.
CALL = re.compile(r"[ \t\r\n]*call:([a-zA-Z0-9_.-]+)(?={)")
PART = re.compile(r"[ \t\r\n]*(?:c|ca|cal|call|call:[a-zA-Z0-9_.-]*)?\Z")
TOKEN = (
    r'[ \t\r\n]*(?:(?P<string>"(?:[^"\\]++|\\.)*+")|(?P<mark>[,:{}\[\]])'
    r'|(?P<word>[^=:,{}\[\]"<\s]++)(?=.))'
)
NO_KEY, COLON = re.compile(r'[ \t\r\n]*[^ \t\r\n"}]'), re.compile(r"[ \t\r\n]*:")
WORDS = {"True": "true", "False": "false", "None": "null"}
PLAIN = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPED = re.compile(r"\\(.)|[\x00-\x1f]", re.DOTALL)
ESCAPES = frozenset('"\\/bfnrtu')


class NoCallError(Exception):
    """Raised if a text is not a tool call."""


class MoreError(NoCallError):
    """Raised if the text ends before the call does."""


def read_call(text: str, at: int, quote: str, names: Collection[str]) -> tuple[str, str, int]:
    """Return (name, arguments as JSON, end) of the call that begins at position `at`.

    quote: marker around strings, for families that do not use JSON. names: functions that may be called.
    Raises NoCallError, MoreError.
    """
    if quote:
        found = CALL.match(text, at)
        if found is None:
            raise MoreError if PART.match(text, at) else NoCallError
        name, (arguments, end) = found[1], _object(text, found.end(), quote)
    else:
        call, end = _object(text, at, quote)
        name, given = call.get("name"), [call[key] for key in ARGUMENTS if key in call]
        arguments = given[0] if given else {}
        if call.keys() - KEYS or len(given) > 1 or not isinstance(arguments, dict):
            raise NoCallError
    if not isinstance(name, str) or name not in names:
        raise NoCallError
    written = json.dumps(arguments, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # half a character, which cannot be sent
        written = json.dumps(arguments)
    return name, written, end


def _object(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    """Parse the object at position `at`; return it and its end. quote: marker around strings.

    Accepts common errors of models: last commas, Python's True, numbers like .5, extra backslashes.
    """
    marked = rf"|[ \t\r\n]*{re.escape(quote)}(?P<marked>.*?){re.escape(quote)}" if quote else ""
    token, found, depth = re.compile(TOKEN + marked, re.DOTALL), list[str](), 0
    while depth or not found:
        if not quote and found[-1:] == ["{"] and NO_KEY.match(text, at):
            raise NoCallError
        piece = token.match(text, at)
        if piece is None:
            raise MoreError if _may_go_on(text[at:].lstrip(SPACE), quote) else NoCallError
        kind, value, at = piece.lastgroup, piece[piece.lastgroup or 0], piece.end()
        if kind == "mark":
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(value, 0)
            if value in "}]" and found[-1:] == [","]:
                found.pop()
        elif kind == "string":
            value = f'"{ESCAPED.sub(_escape, value[1:-1])}"'
        elif kind == "marked":  # nothing escapes in it
            value = json.dumps(value)
        else:
            value = json.dumps(value) if quote and COLON.match(text, at) else _word(value)
        found.append(value)
        if found[0] != "{" or depth > MAX_DEPTH:
            raise NoCallError
    try:
        return json.loads("".join(found)), at
    except ValueError:
        raise NoCallError from None


def _may_go_on(rest: str, quote: str) -> bool:
    """Return True if more text could complete the JSON token `rest`. quote: marker of strings."""
    string = rest[:1] in ("", '"') or (quote != "" and rest.startswith(quote))
    return string or quote.startswith(rest) or not AFTER_WORDS.intersection(rest)


def _word(word: str) -> str:
    """Convert a word to JSON: a number, true, false or null. Raises NoCallError for other words."""
    if word in WORDS or PLAIN.fullmatch(word):
        return WORDS.get(word, word)
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        raise NoCallError from None


def _escape(found: re.Match[str]) -> str:
    """Convert an escape sequence or control character of a Python string to JSON. Unknown escapes keep the backslash."""
    char = found[1]
    if char is None:
        return json.dumps(found[0])[1:-1]
    if char in ESCAPES:
        return found[0]
    return "'" if char == "'" else f"\\\\{json.dumps(char, ensure_ascii=False)[1:-1]}"
