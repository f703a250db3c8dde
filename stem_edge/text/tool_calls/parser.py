"""The parser of an answer that arrives in deltas, which tells text from calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading
from stem_edge.text.tool_calls.families import Family
from stem_edge.text.tool_calls.pieces import Piece, Pieces
from stem_edge.text.tool_calls.reading import read_braces_call, read_json_call


class CallParser:
    """Parser of one answer.

    tools: those that were offered, as checked_tools returns them; None allows any name.
    Text in which a call breaks off, and calls of functions that nobody offered, come out as content.
    White space before a call and after the last one does not come out.
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        names = None if tools is None else {tool["function"]["name"] for tool in tools}
        self._family, self._text = family, ArrivingText()
        self._pieces = Pieces(self._text, names)
        self._reading = self._read()

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are complete with this delta; parts of markers are held back."""
        self._text.add(text)
        next(self._reading, None)
        return self._pieces.taken()

    def finish(self) -> list[Piece]:
        """Return the rest at the end of the answer."""
        self._text.ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        text, family = self._text, self._family
        bare, after_call = bool(family.bare), False  # bare: a call without a marker can be here
        while True:
            yield from text.space()
            if after_call:
                yield from text.skip(family.between.strip())
                yield from text.space()
            char = yield from text.peek()
            if not char:
                break
            if (yield from self._opened(bare)):
                after_call = yield from self._read_calls()
                bare = bare and after_call
            else:
                yield from text.take()
                bare = after_call = False
                self._pieces.content()
        if after_call:
            text.release()
        self._pieces.content()

    def _opened(self, bare: bool) -> Reading[bool]:
        text, family = self._text, self._family
        if (yield from text.skip(family.begin)):
            return True
        return bare and (yield from text.begins(family.bare))

    def _read_calls(self) -> Reading[bool]:
        """Take what stands between markers; return False if it was not all calls."""
        text, quote = self._text, self._family.quote
        try:
            yield from text.space()
            if quote:
                yield from read_braces_call(text, self._pieces, quote)
            else:
                yield from read_json_call(text, self._pieces)
        except NoCallError:
            self._pieces.content()
            return False
        text.release()
        yield from text.space()
        if self._family.end and (yield from text.skip(self._family.end)):
            text.release()
        return True
