"""Messages and tools in OpenAI's form: what is taken, what is copied, what is refused."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract import refused

from stem_edge.errors import InputError
from stem_edge.text.messages import (
    MAX_DEPTH,
    checked_messages,
    checked_template_arguments,
    checked_tools,
)

USER = {"role": "user", "content": "Hello"}


def made(**changes: Any) -> dict[str, Any]:
    return {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"} | changes}


def calling(*calls: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **more}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_messages_with_calls() -> None:
    given = [
        USER | {"name": "Ada"},
        calling(made(arguments='{"a": [1, null, "\\u00e9"]}'), content=None, refusal=None, audio=None),
        {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "fi"},
                                                          {"type": "text", "text": "ne"}]},
        {"role": "assistant", "content": "Good.", "reasoning_content": "Hm.", "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": None},
    ]  # fmt: skip
    kept = json.dumps(given)
    call = made(arguments={"a": [1, None, "é"]})
    checked = [
        USER | {"name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "fine"},
        {"role": "assistant", "content": "Good.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": ""},
    ]
    assert checked_messages(given) == checked == checked_messages(checked)
    assert json.dumps(given) == kept
    bare = {"function": {"name": "f", "arguments": ""}, "index": 0}
    (message,) = checked_messages([calling(bare)])
    assert message["tool_calls"] == [made(arguments={}) | {"id": ""}]
    own = calling(made(arguments={np.str_("a"): np.float64(0.5)}), content=np.str_("x"))
    assert repr(checked_messages([own])) == repr(
        [{"role": "assistant", "content": "x", "tool_calls": [made(arguments={"a": 0.5})]}]
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "is {'role': 'user'}: Expected `content`"), (USER | {"functions": []}, "`functions`"),
        ({"role": "user", "content": None}, "Expected `content`"), ({"content": "x"}, "required field `role`"),
        (USER | {"content": 3}, "content is 3: Expected `str"), (USER | {"name": 3}, "name is 3: Expected `str"),
        (USER | {"content": [{"type": "image_url"}]}, "content[0].type is 'image_url': only text can be"),
        (USER | {"content": [{"type": "input_audio"}]}, "'input_audio'"),
        (USER | {"content": ["x"]}, "content[0] is 'x'"),
        (USER | {"content": [{"type": "text"}]}, "content[0] is {'type': 'text'}: Object missing required field `text`"),
        (USER | {"tool_calls": []}, "which only an assistant makes"),
        (calling(), "Expected `content`"), (calling(content=None), "Expected `content`"),
        (calling("x"), "tool_calls[0] is 'x': Expected `object`"),
        (calling(made() | {"type": "custom"}), "tool_calls[0].type is 'custom'"),
        (calling(made() | {"id": 3}), "tool_calls[0].id is 3: Expected `str"),
        (calling(made(more=1)), "unknown field `more`"),
        (calling(made(name="a b")), "function.name is 'a b': give 1 to 64 of the char"),
        (calling(made(name="a" * 65)), "give 1 to 64"), (calling(made(name="a\n")), "name is 'a\\n'"),
        (calling(made(arguments="{")), "'arguments': '{'}: Expected `arguments` that are a JSON object"),
        *((calling(made(arguments=text)), "a JSON object") for text in ("[" * 10**5, "[]", '{"a": NaN}')),
        (calling(made(arguments={"a": {1}})), "Expected JSON, got {1}"),
        (calling(made(arguments={1: 1})), "Expected JSON, got {1: 1}"),
        (calling(made(arguments=nested(MAX_DEPTH + 1))), "nested at most 64 deep"),
        (calling(made(arguments={"\udcff": 1})), "is not valid Unicode"),
        (calling(made(arguments={"a": "x" * 2**19})), "524,"),
        (calling(*[made()] * 257), "Expected `array` of length <= 256"),
        ({"role": "root", "content": ""}, "messages[1].role is 'root': give system, developer, user, "),
        (USER | {"\udcff": 1}, "messages are not valid Unicode"), ({"role": "\udcff"}, "give them as UTF-8"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(message: object, said: str) -> None:
    refused(partial(checked_messages, [USER, message]), InputError, said)


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | changes}


def test_tools() -> None:
    assert checked_tools(None) is None and checked_tools([]) is None
    empty = {"type": "object", "properties": {}}
    filled = tool(description="", parameters=empty)
    assert checked_tools((tool(strict=True), tool(name="g-1_", parameters={"a": [1]}))) == [
        filled,
        tool(name="g-1_", description="", parameters={"a": [1]}),
    ]
    assert checked_tools([tool(parameters=None)]) == [filled] == checked_tools([filled])
    assert checked_tools([tool(parameters=nested(MAX_DEPTH))])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("f", "tools is 'f': Expected `array`"), ({}, "tools is {}: Expected"), (3, "tools is 3: Expected"),
        ([tool()] * 257, "Expected `array` of length <= 256"), ([3], "tools[0] is 3: Expected `object`"),
        ([{"type": "web_search"}], "tools[0].type is 'web_search': give function,"), ([{}], "required field `function`"),
        ([tool() | {"type": "custom"}], "tools[0].type is 'custom'"),
        ([tool(), tool()], "tools[1].function.name is 'f' again"),
        ([tool(name="")], "tools[0].function.name is ''"), ([tool(name=3)], "name is 3"),
        ([tool(description=3)], "description is 3: Expected `str"), ([tool(strict=1)], "strict is 1"),
        ([tool(parameters=[])], "parameters is []"), ([tool(more=1)], "unknown field `more`"),
        ([tool(parameters=nested(MAX_DEPTH + 1))], "nested at most 64 deep"),
        ([tool(description="x" * 2**19)], "the tools have 524,"),
        ([tool(description="\udcff")], "tools[0].function.description is not valid Unicode"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(tools: object, said: str) -> None:
    refused(partial(checked_tools, tools), InputError, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([1], "template_arguments is [1]: Expected `object`, got `array`"),
        ({f"a{n}": 1 for n in range(65)}, "Expected `object` of length <= 64"),
        ({"1a": 1}, "template_arguments has '1a', expected the name of a variable"),
        ({"messages": 1}, "expected the name of a variable, other than "),
        ({"a": 1.5}, "is {'a': 1.5}: Expected `bool | int | str | null`, got `float`"),
    ],
)
def test_template_arguments_that_are_refused(arguments: Any, said: str) -> None:
    refused(lambda: checked_template_arguments(arguments), InputError, said)
    assert checked_template_arguments(None) == {}
    assert checked_template_arguments({"a": True, "b": None}) == {"a": True, "b": None}
