"""Parses one tool call in an answer's text: its name, and its arguments as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from stem_edge.text.thoughts import SPACE

MAX_DEPTH = 64
AFTER_WORDS = frozenset('=:,{}[]"<' + " \t\n\r\x0b\x0c")
NAME = re.compile(r"[a-zA-Z0-9_.-]*")
WORD = re.compile(r'[^=:,{}\[\]"<\s]*')
STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS |= {"True": "true", "False": "false", "None": "null"}
ESCAPED = re.compile(r"\\(.)|[\x00-\x1f]", re.DOTALL)
ESCAPES = frozenset('"\\/bfnrtu')
ARGUMENTS = ("arguments", "parameters")  # models mix them up


class NoCallError(Exception):
    """Raised if a text is not a tool call."""


class MoreError(NoCallError):
    """Raised if the text ends before the call does."""


class CallReader:
    """Parses the call at position `at` of a text.

    quote: marker around strings, for families that do not use JSON. names: functions that may be
    called; None: any.
    """

    def __init__(self, text: str, at: int, quote: str, names: Collection[str] | None) -> None:
        self._text, self._quote, self._names = text, quote, names
        self.at = at  # place in the text; after `read`, that of the call's end

    def read(self) -> tuple[str, str]:
        """Return the name and the arguments of the call. Raises NoCallError, MoreError."""
        if not self._quote:
            return self._read_json()
        self._expect("call:")
        name = self._offered(self._match(NAME))
        if self._text[self.at] != "{":
            raise NoCallError
        return name, self._read_object()

    def _read_json(self) -> tuple[str, str]:
        """Parse a JSON object with a name and arguments, in either order."""
        name = arguments = ""
        self._expect("{")
        while (char := self._peek()) != "}":
            if char == ",":
                self.at += 1
                continue
            key = self._string()
            self._expect(":")
            if key == "name" and not name:
                name = self._offered(self._string())
            elif key in ARGUMENTS and not arguments and self._peek() == "{":
                arguments = self._read_object()
            elif key in ("id", "type"):
                self._string()
            else:
                raise NoCallError
        self.at += 1
        if not name:
            raise NoCallError
        return name, arguments or "{}"

    def _offered(self, name: str) -> str:
        if not name or (self._names is not None and name not in self._names):
            raise NoCallError
        return name

    def _read_object(self) -> str:
        """Parse the arguments; return them as JSON. Drops trailing commas, which models write."""
        found, comma, depth = "", "", 0
        while depth or not found:
            char = self._peek()
            if char in ",{[}]:":
                self.at += 1
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
                found += "" if char == "," else ("" if char in "}]" else comma) + char
                found += " " * (char == ":")
            else:
                found += comma + (self._quoted() or self._word())
            comma = ", " if char == "," else ""
            if depth > MAX_DEPTH:
                raise NoCallError
        _loaded(found)
        return found

    def _word(self) -> str:
        """Parse a number, true, false, null, or an unquoted key; return it as JSON."""
        word = self._match(WORD)
        if self._quote and word and self._peek() == ":":
            return json.dumps(word, ensure_ascii=False)
        if word in WORDS:
            return WORDS[word]
        if NUMBER.fullmatch(word):
            return word
        try:
            return json.dumps(float(word), allow_nan=False)  # such as .5
        except ValueError:
            raise NoCallError from None

    def _quoted(self) -> str | None:
        """Parse a string and return it as JSON; None if there is no string here."""
        if self._quote and self._comes(self._quote):  # nothing escapes in it
            start = self.at + len(self._quote)
            if (end := self._text.find(self._quote, start)) < 0:
                raise MoreError
            self.at = end + len(self._quote)
            return json.dumps(self._text[start:end], ensure_ascii=False)
        if self._peek() != '"':
            return None
        return f'"{ESCAPED.sub(_escape, self._match(STRING)[1:-1])}"'

    def _string(self) -> str:
        if (text := self._quoted()) is None:
            raise NoCallError
        return str(_loaded(text))

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Consume a match of `pattern` that ends before the text does. Raises MoreError."""
        found = pattern.match(self._text, self.at)
        if found is None or found.end() == len(self._text):
            raise MoreError
        self.at = found.end()
        return found[0]

    def _peek(self) -> str:
        """Skip white space; return the next character."""
        while self.at < len(self._text):
            if (char := self._text[self.at]) not in SPACE:
                return char
            self.at += 1
        raise MoreError

    def _comes(self, text: str) -> bool:
        """True if `text` comes next, after white space. Raises MoreError if more text is needed."""
        self._peek()
        if self._text.startswith(text, self.at):
            return True
        if text.startswith(self._text[self.at :]):
            raise MoreError
        return False

    def _expect(self, text: str) -> None:
        if not self._comes(text):
            raise NoCallError
        self.at += len(text)


def _escape(found: re.Match[str]) -> str:
    """Convert an escape to valid JSON. As in Python, an unneeded backslash is kept."""
    char = found[1]
    if char is None:
        return json.dumps(found[0])[1:-1]
    if char in ESCAPES:
        return found[0]
    return "'" if char == "'" else f"\\\\{json.dumps(char, ensure_ascii=False)[1:-1]}"


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise NoCallError from None
