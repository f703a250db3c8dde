"""The formats in which families of models write tool calls, and how to recognize each family."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """The format of a model family's tool calls.

    signs: regular expressions; the chat templates of the family match all of them. begin, end: markers around a call;
    answers may lack the end. inside: white space between a marker and a call. between: text between calls. bare: an
    answer that begins so is a call without markers. key: field of the arguments in a call that is a JSON object.
    quote: marker around strings in a call like `call:name{key:value}`, for the families that do not use JSON.
    special: markers that are special tokens; decoding must not skip them.
    """

    name: str
    signs: tuple[str, ...]
    begin: str
    end: str = ""
    inside: str = ""
    between: str = "\n"
    bare: str = ""
    key: str = "arguments"
    quote: str = ""
    special: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that decoding must keep in an answer, so that its calls can be parsed."""
        marks = () if self.bare else (self.begin, self.end)
        return (*marks, self.quote) if self.quote else marks


FAMILIES = (
    Family(
        "gemma4",
        (r"<\|tool_call>call:", r"<\|\"\|>"),
        begin="<|tool_call>",
        end="<tool_call|>",
        between="",
        quote='<|"|>',
    ),
    Family(
        "functiongemma",
        ("<start_function_call>call:", "<escape>"),
        begin="<start_function_call>",
        end="<end_function_call>",
        between="",
        quote="<escape>",
    ),
    Family(
        "hermes",  # and Qwen; not templates that write lists of calls
        (r"(?s)\A(?!.*<tool_calls>)", "<tool_call>", r'"arguments\\*":'),
        begin="<tool_call>",
        end="</tool_call>",
        inside="\n",
    ),
    Family(
        "llama3",
        (r"<\|(start_header_id|header_start)\|>", '"name\\\\*": ', '"parameters\\\\*": '),
        begin="<|python_tag|>",
        between="; ",
        bare="{",
        key="parameters",
    ),
)


def family_of(template_source: str, special_tokens: Collection[str] = ()) -> Family | None:
    """Return the family of a chat template, recognized by its source; None if it is unknown.

    special_tokens: names of the tokenizer's special tokens, to find the family's markers among them.
    """
    for family in FAMILIES:
        if all(re.search(sign, template_source) for sign in family.signs):
            special = tuple(mark for mark in family.markers if mark in special_tokens)
            return replace(family, special=special)
    return None
