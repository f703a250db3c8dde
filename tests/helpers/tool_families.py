"""Tools, a call in the words of every family, and templates that write such calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stem_edge.text.messages import checked_tools
from stem_edge.text.tool_calls.families import FAMILIES, Family
from stem_edge.text.tool_calls.parser import Call, CallParser

BY_NAME = {family.name: family for family in FAMILIES}
DEFINED = {"part": {"type": "array", "items": {"$ref": "#/$defs/part"}}}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": ["boolean", "null"]}},
            "required": ["x"],
        },
        "parts": {"$ref": "#/$defs/part"},
        "any": {},
    },
    "required": ["city", "deep"],
    "$defs": DEFINED,
}
FUNCTIONS = ({"name": "weather", "parameters": WEATHER}, {"name": "now"})
TOOLS = checked_tools([{"type": "function", "function": each} for each in FUNCTIONS]) or []
ARGUMENTS: dict[str, Any] = {
    "any": [1, -2.5, "three", {"four": None}],
    "city": 'Zürich "\\ \n{old} town',
    "days": 3,
    "deep": {"x": 1.5, "y": True},
}
VALUE = """{%- macro value(v) -%}
{%- if v is string -%}Q{{ v }}Q{%- elif v is none -%}null
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{ {{- pairs(v) -}} }
{%- elif v is sequence -%}[{% for i in v %}{{ value(i) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(v) -%}
{%- for k, i in v | dictsort -%}{{ k }}:{{ value(i) }}{{ ',' if not loop.last }}{%- endfor -%}
{%- endmacro -%}
"""
# In the words of published templates, without all that has nothing to do with calls.
FORMS = {
    "gemma4": VALUE.replace("Q", '<|"|>')
    + "<|tool_call>call:{{ c.name }}{ {{- pairs(c.arguments) -}} }<tool_call|>",
    "functiongemma": VALUE.replace("Q", "<escape>")
    + "<start_function_call>call:{{ c.name }}{ {{- pairs(c.arguments) -}} }<end_function_call>",
    "hermes": """{{- '\\n<tool_call>\\n{"name": "' + c.name + '", "arguments": ' }}"""
    """{{- c.arguments | tojson }}{{- '}\\n</tool_call>' }}""",
    "llama3": """{{ '; ' if not loop.first }}{{- '{"name": "' + c.name + '", ' }}"""
    """{{- '"parameters": ' }}{{- c.arguments | tojson }}}{# <|start_header_id|> #}""",
}


def template(family: str) -> str:
    """Return a chat template that writes messages, and calls as this family does."""
    return (
        "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}"
        + FORMS[family]
        + "{% endfor %}</{{ m.role }}>{% endfor %}"
    )


def with_markers(name: str, *, special: bool) -> Family:
    """Return a family whose markers are special tokens, or all text."""
    family = BY_NAME[name]
    return replace(family, special=family.markers if special else ())


def read(family: Family, *deltas: str, tools: Any = TOOLS) -> list[str | Call]:
    """Return the texts and calls of an answer, texts joined, with ids that do not differ."""
    parser = CallParser(family, tools)
    pieces = [piece for delta in deltas for piece in parser.push(delta)]
    joined: list[str | Call] = []
    for piece in [*pieces, *parser.push("", ended=True)]:
        match joined[-1:], piece:
            case [str(before)], str():
                joined[-1] = before + piece
            case _:
                joined.append(piece if isinstance(piece, str) else replace(piece, id=""))
    return joined


def call(index: int, name: str, arguments: str) -> Call:
    """Return a call as `read` does."""
    return Call(index, "", name, arguments)
