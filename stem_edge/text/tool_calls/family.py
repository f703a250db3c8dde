"""How a family of models writes calls of tools, and the parser of an answer that arrives in deltas."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stem_edge.errors import InputError
from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError, Reading
from stem_edge.text.tool_calls.forms import BracesForm, CallForm
from stem_edge.text.tool_calls.lark import RuleNames, referred
from stem_edge.text.tool_calls.pieces import Piece, Pieces

Tools = Sequence[Mapping[str, Any]]
OPEN = ("$ref", "anyOf", "oneOf", "allOf")  # of schemas whose properties stand elsewhere


@dataclass(frozen=True)
class Family:
    """How calls are written.

    signs: patterns that are all in the source of a chat template of the family. begin, end: markers
    around a call; the end may be missing. inside: white space between a marker and a call. between: what separates calls. bare: how an answer begins that is a
    call without markers, if there are such. special: markers that are special tokens, whose names
    answers must keep.
    """

    name: str
    signs: tuple[str, ...]
    form: CallForm
    begin: str
    end: str = ""
    inside: str = ""
    between: str = "\n"
    bare: str = ""
    special: tuple[str, ...] = ()

    def parser(self, tools: Tools | None = None) -> CallParser:
        """Return a parser for an answer.

        tools: those that were offered, as checked_tools returns them: calls of others are content.
        """
        return CallParser(self, tools)

    def grammar(
        self,
        tools: Tools,
        *,
        name: str | None = None,
        parallel: bool = False,
    ) -> str:
        """Return a grammar, in llguidance's dialect of Lark, of answers that are calls of tools.

        name: the function that has to be called, any without. parallel: allow several calls.
        Raises InputError for a function that is not among the tools.
        """
        functions = [tool["function"] for tool in tools]
        chosen = [each for each in functions if name in (None, each["name"])]
        if not chosen:
            known = ", ".join(each["name"] for each in functions)
            raise InputError(f"there is no tool {name!a}, expected one of: {known}")
        rules = RuleNames(self.special)
        calls = [self._call(rules, each) for each in chosen]
        return rules.text(self._answer(rules, rules.add(" | ".join(calls)), parallel))

    def _call(self, rules: RuleNames, function: Mapping[str, Any]) -> str:
        name, schema = function["name"], function.get("parameters") or {}
        if "$ref" in schema:  # whose definitions stand beside it
            target = referred(schema, str(schema["$ref"]))
            others = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**others, **(target if isinstance(target, Mapping) else {})}
        if not schema.keys() & OPEN:
            # Closed, because who describes arguments wants no others.
            schema = {"type": "object", "properties": {}, "additionalProperties": False, **schema}
        try:
            return self.form.call(rules, name, schema)
        except RecursionError:
            raise InputError(
                f"the parameters of the tool {name!a} refer to each other too deeply; make them flatter"
            ) from None
        except (AttributeError, TypeError) as error:  # a list where an object should be, and such
            raise InputError(
                f"the parameters of the tool {name!a} are not a JSON Schema ({error}); correct them"
            ) from None

    def _answer(self, rules: RuleNames, call: str, parallel: bool) -> str:
        # Markers that an answer does without are left out, because models then often do, too.
        begin = "" if self.bare else f"{rules.mark(self.begin)} {rules.mark(self.inside)}"
        end = "" if self.bare else f"{rules.mark(self.inside)} {rules.mark(self.end)}"
        one = rules.add(f"{begin} {call} {end}".strip())
        return f"{one} ({rules.mark(self.between)} {one})*" if parallel else one

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers without which an answer cannot be read."""
        around = () if self.bare else (self.begin, self.end)
        return (*around, self.form.quote) if isinstance(self.form, BracesForm) else around


def random_id() -> str:
    """Return an id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class CallParser:
    """Parser of one answer, made by Family.parser.

    Text in which a call breaks off, and calls of functions that nobody offered, come out as content.
    White space before a call and after the last one does not come out.
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Mapping[str, Any]] | None,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        names = None if tools is None else {tool["function"]["name"] for tool in tools}
        self._family, self._text = family, ArrivingText()
        self._pieces = Pieces(self._text, names, new_id)
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
        text, form = self._text, self._family.form
        try:
            yield from text.space()
            yield from form.read(text, self._pieces)
        except NoCallError:
            self._pieces.content()
            return False
        text.release()
        yield from text.space()
        if self._family.end and (yield from text.skip(self._family.end)):
            text.release()
        return True
