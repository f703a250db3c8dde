"""The parser of an answer that arrives in deltas, which tells text from calls of tools."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stem_edge.text.thoughts import SPACE
from stem_edge.text.tool_calls.families import Family
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin, CallEnd, Content, Piece
from stem_edge.text.tool_calls.reading import CallReader, MoreError, NoCallError


class CallParser:
    """Parser of one answer.

    tools: those that were offered, as checked_tools returns them; None allows any name.
    Text in which a call breaks off, and calls of functions that nobody offered, come out as content.
    White space before a call and after the last one does not come out.
    """

    def __init__(self, family: Family, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._names = None if tools is None else {tool["function"]["name"] for tool in tools}
        self._family, self._ended = family, False
        self._text = ""  # that is not in pieces yet; or a call of which some is, from its marker on
        self._bare, self._after_call = bool(family.bare), False  # bare: a call needs no marker here
        self._index, self._begun = -1, False
        self._call: CallReader | None = None  # of a call that is not whole yet
        self._told = 0  # characters of the arguments that are in pieces; -1: all
        self._pieces = list[Piece]()

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain with this delta; parts of markers are held back."""
        self._text += text
        try:
            while self._text:
                self._read()
        except MoreError:
            if self._ended:
                self._content("" if self._after_call else self._text)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest at the end of the answer."""
        self._ended = True
        return self.push("")

    def _read(self) -> None:
        """Take a call, or text before one. Raises MoreError."""
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
        """Return the place of the next character that is no white space."""
        return len(self._text) - len(self._text[at:].lstrip(SPACE))

    def _comes(self, mark: str, at: int) -> bool:
        """Tell whether a marker comes next. Raises MoreError where that is not certain."""
        partly = len(self._text) - at < len(mark) and mark.startswith(self._text[at:])
        if partly and not self._ended:
            raise MoreError
        return bool(mark) and self._text.startswith(mark, at)

    def _take(self, count: int) -> None:
        """Turn the next characters into content, after which no call can be without a marker."""
        self._bare = self._after_call = self._begun = False
        rest, self._told = self._text[count:], 0
        self._content(self._text[:count])
        self._text = rest

    def _content(self, text: str) -> None:
        match self._pieces[-1:]:
            case [Content(before)]:
                self._pieces[-1] = Content(before + text)
            case _ if text:
                self._pieces.append(Content(text))
        self._text = ""

    def _read_call(self, start: int) -> None:
        call = self._call = self._call or CallReader(self._family.quote)
        try:
            try:
                call.read(self._text[start:], ended=self._ended)
            finally:
                self._tell(call)
            end = self._next(start + call.at)
            closed = bool(self._family.end) and self._comes(self._family.end, end)
        except NoCallError:
            self._call = None
            if self._begun:
                self._text = self._text[start + call.told :]
                self._begun, self._told, self._bare, self._after_call = False, 0, False, False
            else:
                self._take(max(start, 1 + self._next(0)))
            return
        self._text = self._text[end + len(self._family.end) if closed else start + call.at :]
        self._begun, self._told, self._after_call, self._call = False, 0, True, None

    def _tell(self, call: CallReader) -> None:
        """Add what is certain of a call. Raises NoCallError for a function that was not offered."""
        if self._told < 0 or not (call.arguments and call.name):
            return
        if not self._begun:
            if self._names is not None and call.name not in self._names:
                raise NoCallError
            self._begun, self._index = True, self._index + 1
            begin = CallBegin(self._index, f"call_{secrets.token_hex(12)}", call.name)
            self._pieces.append(begin)
        if more := call.arguments[self._told :]:
            self._pieces.append(CallArguments(self._index, more))
            self._told = len(call.arguments)
        if call.complete:
            self._pieces.append(CallEnd(self._index))
            self._told = -1
