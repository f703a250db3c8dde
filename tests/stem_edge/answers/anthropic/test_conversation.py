"""Anthropic's messages as templates of chats take them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stem_edge.answers.anthropic.body import Conversation
from stem_edge.answers.anthropic.conversation import messages_of, tools_of, turn_of
from stem_edge.answers.refusals import RefusalError
from stem_edge.runtime.sampling_params import SamplingParams

CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "12 degrees"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def conversation(**told: Any) -> Conversation:
    return msgspec.convert(
        {"messages": [{"role": "user", "content": "Hello"}]} | told, Conversation
    )


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_system_comes_first_and_blocks_stay_blocks() -> None:
    asked = conversation(system=[text("Be"), text(" brief")])
    assert messages_of(asked) == [
        {"role": "system", "content": [text("Be"), text(" brief")]},
        {"role": "user", "content": "Hello"},
    ]


def test_results_come_right_after_calls_and_know_their_tool() -> None:
    thought = {"type": "thinking", "thinking": "I ask.", "signature": "s"}
    asked = conversation(
        messages=[
            {"role": "assistant", "content": [thought, text("Wait"), CALL]},
            {"role": "user", "content": [text("Here"), RESULT]},
        ]
    )
    function = {"name": "weather", "arguments": '{"place":"Paris"}'}
    assert messages_of(asked) == [
        {
            "role": "assistant",
            "content": [text("Wait")],
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "I ask.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "12 degrees", "name": "weather"},
        {"role": "user", "content": [text("Here")]},
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [("no such place", "Error: no such place"), ([text("none")], [text("Error: "), text("none")])],
)
def test_results_that_are_errors_say_so(content: Any, told: Any) -> None:
    result = RESULT | {"content": content, "is_error": True}
    asked = conversation(messages=[{"role": "user", "content": [result]}])
    assert messages_of(asked)[0]["content"] == told


@pytest.mark.parametrize(
    "block", [IMAGE, {"type": "document"}, {**RESULT, "content": [text("a"), IMAGE]}]
)
def test_what_is_no_text_is_refused_by_name(block: dict[str, Any]) -> None:
    asked = conversation(messages=[{"role": "user", "content": [block]}])
    with pytest.raises(RefusalError, match=r"messages\[0\].content: (image|document) input is not"):
        messages_of(asked)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
    ],
)
def test_the_template_is_told_whether_to_think(given: Any, told: dict[str, bool]) -> None:
    assert turn_of(conversation(**given), SamplingParams()).template_arguments == told


def test_tools_have_the_form_of_chat_completions() -> None:
    schema = {"type": "object", "properties": {}}
    tool = {"name": "weather", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    function = {"name": "weather", "description": "", "parameters": schema}
    asked = conversation(tools=[tool])
    assert tools_of(asked.tools) == [{"type": "function", "function": function}]


def test_tools_that_run_elsewhere_are_refused_by_name() -> None:
    asked = conversation(tools=[{"type": "web_search_20250305", "name": "search"}])
    with pytest.raises(RefusalError, match=r"tools\[0\] \(search\) is of type web_search_20250305"):
        tools_of(asked.tools)
