"""The known families, and how to find a chat template's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from stem_edge.text.tool_calls.family import Family
from stem_edge.text.tool_calls.forms import BracesForm
from stem_edge.text.tool_calls.json_form import JsonForm

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
        "hermes",
        (r"(?s)\A(?!.*<tool_calls>)", "<tool_call>", r'"arguments\\*":'),  # no lists of calls
        JsonForm("arguments"),
        begin="<tool_call>",
        end="</tool_call>",
        inside="\n",
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
    """Return the family of a chat template, by what the template writes; None if it is unknown.

    special_tokens: names of those of the tokenizer, which may be some of the family's markers.
    """
    for family in FAMILIES:
        if all(re.search(sign, template_source) for sign in family.signs):
            special = tuple(mark for mark in family.markers if mark in special_tokens)
            return replace(family, special=special)
    return None
