"""Families of models by how they write calls of tools, each a description."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stem_edge.errors import InputError
from stem_edge.text.tool_calls.forms import BracesForm, Form, PythonForm
from stem_edge.text.tool_calls.json_form import JsonForm
from stem_edge.text.tool_calls.lark import Rules, referred
from stem_edge.text.tool_calls.parser import CallParser
from stem_edge.text.tool_calls.tags_form import TagsForm

Tools = Sequence[Mapping[str, Any]]
OPEN = ("$ref", "anyOf", "oneOf", "allOf")  # of schemas whose properties stand elsewhere


@dataclass(frozen=True)
class Family:
    """How calls are written.

    signs: patterns that are all in the source of a chat template of the family. begin, end: markers
    around a call, or around a list of them (listed); the end may be missing. inside: white space
    between a marker and a call. between: what separates calls. bare: how an answer begins that is a
    call without markers, if there are such. special: markers that are special tokens, so that
    answers have to be decoded with skip_special_tokens=False if there are any.
    """

    name: str
    signs: tuple[str, ...]
    form: Form
    begin: str
    end: str = ""
    inside: str = ""
    between: str = "\n"
    bare: str = ""
    listed: bool = False
    special: tuple[str, ...] = ()

    def parser(self, tools: Tools | None = None) -> CallParser:
        """Return a parser for an answer.

        tools: those that were offered, as checked_tools returns them: calls of others are content,
        and their schemas tell texts from numbers where the family does not write which is which.
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
        rules = Rules(self.special)
        calls = [self._call(rules, each) for each in chosen]
        return rules.text(self._answer(rules, rules.add(" | ".join(calls)), parallel))

    def _call(self, rules: Rules, function: Mapping[str, Any]) -> str:
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

    def _answer(self, rules: Rules, call: str, parallel: bool) -> str:
        # Markers that an answer does without are left out, because models then often do, too.
        begin = "" if self.bare else f"{rules.mark(self.begin)} {rules.mark(self.inside)}"
        end = "" if self.bare else f"{rules.mark(self.inside)} {rules.mark(self.end)}"
        if self.listed:
            more = f'(", " {call})*' if parallel else ""
            return f'{begin} "[" {call} {more} "]" {end}'
        one = rules.add(f"{begin} {call} {end}".strip())
        return f"{one} ({rules.mark(self.between)} {one})*" if parallel else one

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers without which an answer cannot be read."""
        around = () if self.bare else (self.begin, self.end)
        return (*around, self.form.quote) if isinstance(self.form, BracesForm) else around


FAMILIES = (
    Family(
        "gemma4",
        (r"<\|tool_call>call:", r"<\|\"\|>"),
        BracesForm('<|"|>'),
        begin="<|tool_call>",
        end="<tool_call|>",
        between="",
    ),
    Family(
        "functiongemma",
        ("<start_function_call>call:", "<escape>"),
        BracesForm("<escape>"),
        begin="<start_function_call>",
        end="<end_function_call>",
        between="",
    ),
    Family(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        TagsForm(),
        begin="<tool_call>",
        end="</tool_call>",
        inside="\n",
    ),
    Family(
        "hermes",
        (r"(?s)\A(?!.*<tool_calls>)", "<tool_call>", r'"arguments\\*":'),  # no lists of calls
        JsonForm("arguments"),
        begin="<tool_call>",
        end="</tool_call>",
        inside="\n",
    ),
    Family(
        "lfm2",
        (r"<\|tool_call_start\|>",),
        PythonForm(),
        begin="<|tool_call_start|>",
        end="<|tool_call_end|>",
        listed=True,
    ),
    Family(
        "pythonic",
        (r"\[func_name1\(params_name1=params_value1",),
        PythonForm(),
        begin="<|python_start|>",
        end="<|python_end|>",
        bare="[",
        listed=True,
    ),
    Family(
        "llama3",
        (r"<\|(start_header_id|header_start)\|>", '"name\\\\*": ', '"parameters\\\\*": '),
        JsonForm("parameters"),
        begin="<|python_tag|>",
        between="; ",
        bare="{",
    ),
)


def family_of(template_source: str, special_tokens: Collection[str] = ()) -> Family | None:
    """Return the family of a chat template, by what the template writes; None if none is known.

    special_tokens: names of those of the tokenizer, which may be some of the family's markers.
    """
    for family in FAMILIES:
        if all(re.search(sign, template_source) for sign in family.signs):
            special = tuple(mark for mark in family.markers if mark in special_tokens)
            return replace(family, special=special)
    return None
