"""Anthropic's Messages interface over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Paris", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "input_schema": SCHEMA}
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 16,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Hello"}],
}
CALLING = ASKED | {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}


def post(url: str, path: str = "/v1/messages", **body: Any) -> httpx2.Response:
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    return httpx2.post(url + path, json=body, headers=headers, timeout=60)


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Read a stream; the name of each event is its type."""
    told = list[dict[str, Any]]()
    for block in response.text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            told.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {told[-1]['type']}"
    return told


def test_stream_tells_the_whole_message(chat_url: str) -> None:
    whole = post(chat_url, **ASKED).json()
    told = events(post(chat_url, **ASKED, stream=True))
    kinds = [each["type"] for each in told]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(each["delta"]["text"] for each in told[3:-3])
    assert whole["content"] == [{"type": "text", "text": text}]
    assert whole["stop_reason"] == told[-2]["delta"]["stop_reason"] == "max_tokens"
    assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 16


def test_stop_sequence_is_named(chat_url: str) -> None:
    text = post(chat_url, **ASKED).json()["content"][0]["text"]
    stopped = post(chat_url, **ASKED, stop_sequences=[text[3:6]]).json()
    assert stopped["stop_reason"] == "stop_sequence"
    assert stopped["stop_sequence"] == text[3:6]
    assert stopped["content"][0]["text"] == text[: text.index(text[3:6])]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_required_call_is_a_block(chat_url: str, choice: dict[str, Any]) -> None:
    one = choice | {"disable_parallel_tool_use": True}
    whole = post(chat_url, **(CALLING | {"tool_choice": one})).json()
    assert whole["stop_reason"] == "tool_use"
    (block,) = (block for block in whole["content"] if block["type"] == "tool_use")
    assert (block["name"], block["input"]["place"] in ("Paris", "Rome")) == ("weather", True)


def test_input_of_a_call_is_streamed(chat_url: str) -> None:
    told = events(post(chat_url, **CALLING, stream=True))
    at = next(n for n, e in enumerate(told) if e.get("content_block", {}).get("type") == "tool_use")
    end = next(n for n in range(at, len(told)) if told[n]["type"] == "content_block_stop")
    pieces = [each["delta"]["partial_json"] for each in told[at + 1 : end]]
    assert json.loads("".join(pieces))["place"] in ("Paris", "Rome")


def test_form_of_the_text_is_kept(chat_url: str) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    whole = post(chat_url, **(ASKED | {"max_tokens": 100}), output_config=form).json()
    assert json.loads(whole["content"][0]["text"])["place"] in ("Paris", "Rome")


def test_count_is_that_of_the_message(chat_url: str) -> None:
    asked = {"messages": ASKED["messages"], "system": [{"type": "text", "text": "Be brief"}]}
    count = post(chat_url, "/v1/messages/count_tokens", **asked).json()
    usage = post(chat_url, **(ASKED | asked)).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content"),
        ({"temperature": 2}, "temperature"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_bad_bodies_are_told_in_anthropics_form(
    chat_url: str, change: dict[str, Any], named: str
) -> None:
    response = post(chat_url, **(ASKED | change))
    assert response.status_code == 400
    told = response.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert named in told["error"]["message"]
