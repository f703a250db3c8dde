"""Reading of a call from the text of an answer: the name, and the arguments as JSON text.

Readers are written as if all of the text were there. Where it ends too early they raise MoreError, and
begin again before the value that was not whole.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

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
    """Raised where text is no call, or no longer one."""


class MoreError(Exception):
    """Raised where a call goes on in text that has not come yet."""


class CallReader:
    """Reader of the call at the beginning of a text.

    quote: marker around strings, of families that have no JSON.
    """

    def __init__(self, quote: str = "") -> None:
        self._text, self._ended, self._quote = "", False, quote
        self.at = self._mark = 0  # places in the text: of the reader, and where it begins again
        self._inside, self._depth, self._comma = False, 0, ""  # of the arguments
        self.name, self.arguments = "", ""  # arguments: JSON, as far as they are certain
        self.told = 0  # place after the last of them
        self.complete = False  # True once the arguments are whole

    def read(self, text: str, *, ended: bool) -> None:
        """Read the call from all of the text that has come. Raises NoCallError, MoreError."""
        self._text, self._ended, self.at = text, ended, self._mark
        if self._inside:
            self._read_object()
        if not self._quote:
            self._read_json()
        elif not self.complete:
            self._space()
            self._expect("call:")
            self.name = self._match(NAME)
            if not self.name or self._peek() != "{":
                raise NoCallError
            self._read_object()

    def _read_json(self) -> None:
        """Read a JSON object with a name and arguments, in either order."""
        if not self._mark:
            self._space()
            self._expect("{")
        while not self._closes():
            key = self._string()
            self._space()
            self._expect(":")
            self._space()
            if key == "name" and not self.name:
                self.name = self._string()
            elif key in ARGUMENTS and not self.complete and self._peek() == "{":
                self._read_object()
            elif key in ("id", "type"):
                self._string()
            else:
                raise NoCallError
            self._mark = self.at
        if not self.name:
            raise NoCallError
        if not self.complete:
            self.arguments, self.told, self.complete = "{}", self.at, True

    def _closes(self) -> bool:
        """Read the end of an object, or what is between two members."""
        self._space()
        self._skip(",")
        self._space()
        return self._skip("}")

    def _read_object(self) -> None:
        """Read the arguments, or go on with them."""
        self._inside = True
        while self._depth or not self.arguments:
            self._mark = self.at
            self._space()
            if self._skip(","):
                self._comma = ", "  # written with the next value: models put commas behind the last
                continue
            char, depth = self._peek(), 0
            part = "" if char in ("}", "]") else self._comma
            if char in ("{", "[", "}", "]", ":"):
                depth = {"{": 1, "[": 1, ":": 0}.get(char, -1)
                self.at += 1
                part += char + " " * (char == ":")
            elif (text := self._quoted()) is not None:
                part += text
            else:
                part += self._word()
            self._depth, self._comma = self._depth + depth, ""
            self.arguments, self.told = self.arguments + part, self.at
            if self._depth > MAX_DEPTH:
                raise NoCallError
        _loaded(self.arguments)
        self._inside, self.complete, self._mark = False, True, self.at

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
                self._more()
            text, self.at = self._text[self.at : end], end + len(self._quote)
            return json.dumps(text, ensure_ascii=False)
        if self._peek() != '"':
            return None
        found = STRING.match(self._text, self.at)
        if found is None:
            self._more()
        self.at = found.end()
        return f'"{ESCAPED.sub(_escape, found[1])}"'

    def _string(self) -> str:
        if (text := self._quoted()) is None:
            raise NoCallError
        return str(_loaded(text))

    def _more(self) -> NoReturn:
        raise NoCallError if self._ended else MoreError

    def _peek(self) -> str:
        if self.at == len(self._text):
            self._more()
        return self._text[self.at]

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Read what matches, which ends before another character."""
        found = pattern.match(self._text, self.at)
        if found is None or (found.end() == len(self._text)):
            self._more()
        self.at = found.end()
        return found[0]

    def _skip(self, text: str) -> bool:
        """Read this text if it comes next; tell whether it came."""
        if self._text.startswith(text, self.at):
            self.at += len(text)
            return True
        if not self._ended and text.startswith(self._text[self.at :]):
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
