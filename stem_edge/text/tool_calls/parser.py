"""A streaming parser that separates tool calls from text in an answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stem_edge.text.thoughts import SPACE
from stem_edge.text.tool_calls.families import Family
from stem_edge.text.tool_calls.reading import MoreError, NoCallError, read_call


@dataclass(frozen=True)
class Call:
    index: int  # number of the call in its answer, from 0
    id: str  # in the form of OpenAI's ids
    name: str
    arguments: str  # the text of a JSON object


class CallParser:
    """Separates the tool calls of one answer from its text.

    tools: the offered tools, as checked_tools returns them.
    Incomplete calls, and calls of functions that were not offered, are returned as text.
    White space before a call and after the last call is dropped.
    """

    def __init__(self, family: Family, tools: Sequence[Mapping[str, Any]]) -> None:
        self._names = {tool["function"]["name"] for tool in tools}
        self._family, self._ended = family, False
        self._text = ""  # text that push has not returned yet
        self._due = 0  # length of _text from which an unfinished call is read again
        self._open = self._counted = 0  # braces that are open after this many characters of _text
        mark = re.escape(family.quote or "\0")
        self._braces = re.compile(
            rf'[{{}}]|"(?:[^"\\]++|\\.)*+"|{mark}.*?{mark}|{mark}|"', re.DOTALL
        )
        self._bare, self._after_call = bool(family.bare), False  # bare: a call needs no marker here
        self._count = 0  # of calls
        self._pieces = list[str | Call]()

    def push(self, text: str, *, ended: bool = False) -> list[str | Call]:
        """Add text; return complete calls, and text outside calls. ended: no more text follows."""
        self._text, self._ended = self._text + text, ended
        try:
            # Read an unfinished call again only where it may end, not with each delta.
            closed = "}" in text and self._braces_are_closed()
            while self._text and (ended or closed or len(self._text) >= self._due):
                self._read()
        except MoreError:
            if ended:
                self._content("" if self._after_call else self._text)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _braces_are_closed(self) -> bool:
        for found in self._braces.finditer(self._text, self._counted):
            if found[0] in ('"', self._family.quote):  # a string that is not complete
                break
            change, self._counted = {"{": 1, "}": -1}.get(found[0], 0), found.end()
            self._open += change
        return self._open <= 0

    def _read(self) -> None:
        """Consume one call, or text before a call. Raises MoreError."""
        self._due = self._open = self._counted = 0
        at = self._next(0)
        if self._after_call and self._comes(self._family.between.strip(), at):
            at = self._next(at + len(self._family.between.strip()))
        if at == len(self._text):
            raise MoreError
        if self._comes(self._family.begin, at):
            self._read_call(at + len(self._family.begin))
        elif self._bare and self._comes(self._family.bare, at):
            self._read_call(at)
        else:
            stops = (self._text.find(char, at + 1) for char in (*SPACE, self._family.begin[0]))
            self._take(min((stop for stop in stops if stop > 0), default=len(self._text)))

    def _next(self, at: int) -> int:
        return len(self._text) - len(self._text[at:].lstrip(SPACE))

    def _comes(self, mark: str, at: int) -> bool:
        """Return True if `mark` is at index `at`. Raises MoreError if the text is too short."""
        partly = len(self._text) - at < len(mark) and mark.startswith(self._text[at:])
        if partly and not self._ended:
            raise MoreError
        return bool(mark) and self._text.startswith(mark, at)

    def _take(self, count: int) -> None:
        """Consume `count` characters as content. After content, a tool call counts only if it begins with a marker."""
        self._bare = self._after_call = False
        rest = self._text[count:]
        self._content(self._text[:count])
        self._text = rest

    def _content(self, text: str) -> None:
        match self._pieces[-1:]:
            case [str(before)]:
                self._pieces[-1] = before + text
            case _ if text:
                self._pieces.append(text)
        self._text = ""

    def _read_call(self, start: int) -> None:
        try:
            name, arguments, after = read_call(self._text, start, self._family.quote, self._names)
        except NoCallError as error:
            if isinstance(error, MoreError) and not self._ended:
                self._due = len(self._text) * 5 // 4
                raise
            self._take(max(start, 1 + self._next(0)))
            return
        end = self._next(after)
        closed = bool(self._family.end) and self._comes(self._family.end, end)
        self._pieces.append(Call(self._count, f"call_{secrets.token_hex(12)}", name, arguments))
        self._text = self._text[end + len(self._family.end) if closed else after :]
        self._count, self._after_call = self._count + 1, True
