"""Which family a chat template is of, and its calls rendered and read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_families import ARGUMENTS, BY_NAME, TOOLS, call, read, template, with_markers

from stem_edge.text.chat_worker import answer
from stem_edge.text.messages import checked_messages
from stem_edge.text.tool_calls.families import family_of
from stem_edge.text.tool_calls.parser import Call

# What published templates write, cut down to where they differ.
WRITTEN = [
    ("{{- '<|tool_call>call:' + function['name'] + '{' -}}{{ '<|\"|>' + argument }}", "gemma4"),
    ("{{ '<start_function_call>call:' }}{{ '<escape>' + argument }}", "functiongemma"),
    ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}', "hermes"),
    ('{{- \'<tool_call>\' }}{"name": {{ name }}, "arguments": {{ args }}}', "hermes"),
    ("'<tool_call>\\n<function=' + name + '>\\n' '<parameter=' + k + '>\\n'", None),
    (
        "<|start_header_id|>{{- '{\"name\": \"' + name + '\", ' }}{{- '\"parameters\": ' }}",
        "llama3",
    ),
    ("<|header_start|>{{- '{\"name\": \"' + name + '\", ' }}{{- '\"parameters\": ' }}", "llama3"),
    ("<start_of_turn>user [func_name1(params_name1=params_value1...)]", None),
    ("{{- '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' }}", None),
    ("{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}{% endfor %}", None),
    ("<|start_header_id|>{{ m.content }}", None),
    ("in <tool_call> tags: '<tool_calls>[{\"name\": ' + name + ', \"arguments\": ' + args", None),
    ("'<tool_call>' + name + '\\n<arg_key>' + k + '</arg_key>'", None),
    ("'<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' + k", None),
    ("", None),
]


@pytest.mark.parametrize(("source", "name"), WRITTEN)
def test_families_by_what_their_templates_write(source: str, name: str | None) -> None:
    found = family_of(source)
    assert (found and found.name) == name


def test_markers_that_are_special_tokens() -> None:
    source = template("gemma4")
    tokens = ["<bos>", '<|"|>', "<|tool_call>"]
    found = family_of(source, tokens)
    assert found is not None and set(found.special) == {'<|"|>', "<|tool_call>"}
    assert BY_NAME["gemma4"].special == ()
    # Calls of these can be read without their marker, so that it may stay hidden.
    llama = family_of(template("llama3"), ["<|python_tag|>", "<|eot_id|>"])
    assert llama is not None and llama.special == ()


def conversation(*calls: dict[str, Any], content: str | None) -> list[dict[str, Any]]:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for n, each in enumerate(calls)
    ]
    return checked_messages(
        [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": content, "tool_calls": made},
            {"role": "tool", "tool_call_id": "c0", "content": "fine"},
        ]
    )


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_a_conversation_is_rendered_and_read_back(name: str, content: str | None) -> None:
    source = template(name)
    family = family_of(source)
    assert family == with_markers(name, special=False)
    messages = conversation(ARGUMENTS, {}, content=None if family.bare else content)
    request = {"template": source, "messages": messages, "tools": TOOLS, "tokens": {}}
    text = answer(request | {"add_generation_prompt": False})["text"]
    assert '"description": ""' in text  # the tools
    pieces = read(family, text.split("<assistant>")[1].split("</assistant>")[0])
    first = pieces[-2]
    assert isinstance(first, Call) and json.loads(first.arguments) == ARGUMENTS
    begin = [content] if content and not family.bare else []
    assert pieces == [*begin, first, call(1, "weather", "{}")]


MARKS = ('<|"|>', "<escape>")
TEXT = st.text(max_size=20).filter(lambda text: not any(mark in text for mark in MARKS))
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
KEY = st.from_regex("[a-z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)
GIVEN = st.fixed_dictionaries(
    {"city": TEXT},
    optional={"days": st.integers(), "deep": st.dictionaries(KEY, VALUE), "any": VALUE},
)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(BY_NAME)), st.lists(GIVEN, min_size=1, max_size=2), st.data())
def test_arguments_come_back_as_they_were(
    name: str, calls: list[dict[str, Any]], data: st.DataObject
) -> None:
    request = {"template": template(name), "messages": conversation(*calls, content=None)}
    text = answer(request | {"tokens": {}, "add_generation_prompt": False})["text"]
    text = text.split("<assistant>", 1)[1].rsplit("</assistant>", 1)[0]
    at = data.draw(st.integers(0, len(text)))
    pieces = read(BY_NAME[name], text[:at], text[at:])
    assert [json.loads(getattr(piece, "arguments", "")) for piece in pieces] == calls
