"""The Responses interface, asked by the package `openai`, which checks each answer's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Paris", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
ASKED: dict[str, Any] = {"model": "m", "input": "Hello", "max_output_tokens": 16, "temperature": 0}
CALLING = ASKED | {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200}
FORMAT = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(chat_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{chat_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_answer_is_cut_off_at_its_limit(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 16
    assert response.usage.total_tokens == response.usage.input_tokens + 16


def test_events_come_in_order_and_tell_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert text == events[-1].response.output_text == whole.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_required_calls_are_items(client: openai.OpenAI, choice: Any) -> None:
    response = client.responses.create(**(CALLING | {"tool_choice": choice}))
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    assert all(json.loads(call.arguments)["place"] in ("Paris", "Rome") for call in calls)


def test_calls_are_streamed_as_the_package_reads_them(client: openai.OpenAI) -> None:
    with client.responses.stream(**CALLING, parallel_tool_calls=False) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        (call,) = (i for i in stream.get_final_response().output if i.type == "function_call")
    at = kinds.index("function_call_arguments.delta")
    assert kinds[at - 1] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert json.loads(call.arguments)["place"] in ("Paris", "Rome")


def test_form_of_the_text_is_kept(client: openai.OpenAI) -> None:
    response = client.responses.create(**(ASKED | {"text": FORMAT, "max_output_tokens": 100}))
    assert json.loads(response.output_text)["place"] in ("Paris", "Rome")


def test_a_conversation_with_calls_is_taken(client: openai.OpenAI) -> None:
    given: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief"}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "r1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12 degrees"},
    ]
    longer = client.responses.input_tokens.count(model="m", input=given)
    shorter = client.responses.input_tokens.count(model="m", input=given[:2])
    assert longer.input_tokens > shorter.input_tokens
    assert client.responses.create(**(ASKED | {"input": given})).output


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("max_tokens", 5),
        ("max_new_tokens", 5),
        ("response_format", {"type": "json_object"}),
        ("truncation", "auto"),
        ("tool_choice", {"type": "file_search"}),
        ("tools[0].type", [{"type": "web_search"}]),
        ("input[0].type", [{"type": "item_reference", "id": "i"}]),
        (
            "input[0].content[0]",
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        ),
        ("max_output_tokens", 0),
        ("temperature", 3),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, field: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, extra_body={field.partition("[")[0]: value})
    assert caught.value.param == field
    assert field.partition("[")[0] in str(caught.value)
