"""Forms of a call: how a function's name and its arguments are written between markers.

json_form.py has the form in JSON; here is the one of Gemma.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Protocol

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading
from stem_edge.text.tool_calls.lark import RuleNames, Schema, Values, literal
from stem_edge.text.tool_calls.pieces import Pieces
from stem_edge.text.tool_calls.values import Syntax, read_members

IN_NAMES = frozenset(string.ascii_letters + string.digits + "_-.")


class CallForm(Protocol):
    """How a call is written."""

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call. Raises NoCallError where the text is not a call, or stops being one."""

    def call(self, rules: RuleNames, name: str, schema: Schema) -> str:
        """Return the name of a rule for a call of this function; schema: of its arguments."""


@dataclass(frozen=True)
class BracesForm:
    """`call:name{key:value}` with a marker around texts instead of quotes, as Gemma writes it."""

    quote: str

    @property
    def _syntax(self) -> Syntax:
        return Syntax(self.quote)

    def read(self, text: ArrivingText, pieces: Pieces) -> Reading[None]:
        """Take a call; see Form."""
        yield from text.expect("call:")
        name = yield from text.while_in(IN_NAMES)
        if (yield from text.peek()) != "{":
            raise NoCallError
        pieces.begin(name)
        yield from read_members(text, pieces.arguments, self._syntax)
        pieces.end()

    def call(self, rules: RuleNames, name: str, schema: Schema) -> str:
        """Return a rule; see Form."""
        members = Values(rules, self.quote, schema).members(schema)
        return rules.add(f'{literal(f"call:{name}{{")} {members} "}}"')
