"""Reading of a call from the text of an answer: the name, and the arguments as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from stem_edge.text.thoughts import SPACE

MAX_DEPTH = 64
AFTER_WORDS = frozenset('=:,{}[]"<' + " \t\n\r\x0b\x0c")
NAME = re.compile(r"[a-zA-Z0-9_.-]*")
WORD = re.compile(r'[^=:,{}\[\]"<\s]*')
STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS |= {"True": "true", "False": "false", "None": "null"}
ESCAPED = re.compile(r"\\(.)|[\x00-\x1f]", re.DOTALL)
ESCAPES = frozenset('"\\/bfnrtu')
ARGUMENTS = ("arguments", "parameters")  # models mix them up


class NoCallError(Exception):
    """Raised where text is no call."""


class MoreError(NoCallError):
    """Raised where the text ends before a call does."""


class CallReader:
    """Reader of the call at a place in a text.

    quote: marker around strings, of families that have no JSON. names: of the functions that may be
    called; None: any.
    """

    def __init__(self, text: str, at: int, quote: str, names: Collection[str] | None) -> None:
        self._text, self._quote, self._names = text, quote, names
        self.at = at  # place in the text; after `read`, that of the call's end

    def read(self) -> tuple[str, str]:
        """Return the name and the arguments of the call. Raises NoCallError, MoreError."""
        self._space()
        if not self._quote:
            return self._read_json()
        self._expect("call:")
        name = self._offered(self._match(NAME))
        if self._peek() != "{":
            raise NoCallError
        return name, self._read_object()

    def _read_json(self) -> tuple[str, str]:
        """Read a JSON object with a name and arguments, in either order."""
        name = arguments = ""
        self._expect("{")
        while not self._closes():
            key = self._string()
            self._space()
            self._expect(":")
            self._space()
            if key == "name" and not name:
                name = self._offered(self._string())
            elif key in ARGUMENTS and not arguments and self._peek() == "{":
                arguments = self._read_object()
            elif key in ("id", "type"):
                self._string()
            else:
                raise NoCallError
        if not name:
            raise NoCallError
        return name, arguments or "{}"

    def _offered(self, name: str) -> str:
        if not name or (self._names is not None and name not in self._names):
            raise NoCallError
        return name

    def _closes(self) -> bool:
        """Read the end of an object, or what is between two members."""
        self._space()
        self._skip(",")
        self._space()
        return self._skip("}")

    def _read_object(self) -> str:
        """Read the arguments as JSON. A comma is written with the next value: models put one behind the last."""
        found, comma, depth = "", "", 0
        while depth or not found:
            self._space()
            if self._skip(","):
                comma = ", "
                continue
            char = self._peek()
            if char in "{[}]:":
                depth += {"{": 1, "[": 1, ":": 0}.get(char, -1)
                self.at += 1
                found += ("" if char in "}]" else comma) + char + " " * (char == ":")
            else:
                found += comma + (self._quoted() or self._word())
            comma = ""
            if depth > MAX_DEPTH:
                raise NoCallError
        _loaded(found)
        return found

    def _word(self) -> str:
        """Read a number, true, false, null, or a key without quotes where there are such."""
        word = self._match(WORD)
        self._space()
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
        """Read a string and return it as JSON; None for anything else."""
        if self._quote and self._skip(self._quote):  # nothing escapes in it
            end = self._text.find(self._quote, self.at)
            if end < 0:
                raise MoreError
            text, self.at = self._text[self.at : end], end + len(self._quote)
            return json.dumps(text, ensure_ascii=False)
        if self._peek() != '"':
            return None
        found = STRING.match(self._text, self.at)
        if found is None:
            raise MoreError
        self.at = found.end()
        return f'"{ESCAPED.sub(_escape, found[1])}"'

    def _string(self) -> str:
        if (text := self._quoted()) is None:
            raise NoCallError
        return str(_loaded(text))

    def _peek(self) -> str:
        if self.at == len(self._text):
            raise MoreError
        return self._text[self.at]

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Read what matches, which ends before another character."""
        found = pattern.match(self._text, self.at)
        if found is None or found.end() == len(self._text):
            raise MoreError
        self.at = found.end()
        return found[0]

    def _skip(self, text: str) -> bool:
        """Read this text if it comes next; tell whether it came."""
        if self._text.startswith(text, self.at):
            self.at += len(text)
            return True
        if text.startswith(self._text[self.at :]):
            raise MoreError
        return False

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise NoCallError

    def _space(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in SPACE:
            self.at += 1


def _escape(found: re.Match[str]) -> str:
    """Return an escape as JSON. As in Python, a backslash that escapes nothing stands for itself."""
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
