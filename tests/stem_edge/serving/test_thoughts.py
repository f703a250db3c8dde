"""Thoughts in each interface, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import Mock

import httpx2
import msgspec
import openai
import pytest
from chats import thinking
from servers import serving

import stem_edge
from stem_edge.answers.events import End, Thought
from stem_edge.answers.openai.responses_answer import AnswerItems
from stem_edge.answers.openai.responses_body import Body
from stem_edge.answers.openai.responses_input import messages_of
from stem_edge.serving import app

FRANCE = "The capital of France is"
ASKED: dict[str, Any] = {"model": "m", "temperature": 0}
TURNS: Any = [{"role": "user", "content": FRANCE}]
THOUGHT, ANSWER = "Paris. It is a", "in Europe."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        thinking(tmp_path_factory.mktemp("chat")) as bundle,
        stem_edge.load(bundle, warm_start=False) as model,
        model.conversation() as conversation,
        serving(app(model, name="m")) as url,
    ):
        list(conversation.send(FRANCE, max_new_tokens=2))  # which starts its threads
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.mark.parametrize(("most", "answer", "reason"), [(11, ANSWER, "stop"), (5, "", "length")])
def test_chat_completions(client: openai.OpenAI, most: int, answer: str, reason: str) -> None:
    asked = ASKED | {"messages": TURNS, "max_tokens": most}
    whole = client.chat.completions.create(**asked).choices[0]
    thought = whole.message.reasoning_content
    assert THOUGHT.startswith(thought) and (thought == THOUGHT) == bool(answer)
    assert (whole.message.content, whole.finish_reason) == (answer, reason)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    deltas = [chunk.delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == answer
    assert chunks[-1].finish_reason == reason


def test_thoughts_come_back_and_a_grammar_leaves_none(client: openai.OpenAI) -> None:
    answer = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    asked = ASKED | {"messages": [*TURNS, answer, *TURNS], "max_tokens": 3}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content
    asked["extra_body"] = {"guided_regex": " Paris"}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content == " Paris"
    assert not hasattr(message, "reasoning_content")


def test_responses(client: openai.OpenAI) -> None:
    asked = ASKED | {"input": TURNS, "max_output_tokens": 11}
    whole = client.responses.create(**asked)
    thought, message = whole.output
    assert thought.type == "reasoning" and message.type == "message"
    assert [part.text for part in thought.content or ()] == [THOUGHT]
    assert whole.output_text == ANSWER
    assert whole.usage and 5 < whole.usage.output_tokens_details.reasoning_tokens < 10
    with client.responses.stream(**asked) as stream:
        events = [event for event in stream if event.type.startswith("response.reasoning_text")]
        assert stream.get_final_response().output_text == ANSWER
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
    assert getattr(events[-1], "text", "") == THOUGHT
    again: Any = [*TURNS, *(item.model_dump() for item in whole.output), *TURNS]
    assert client.responses.create(**(asked | {"input": again})).output


@pytest.mark.parametrize(
    ("reason", "kinds"), [("stop", ["reasoning", "message"]), ("length", ["reasoning"])]
)
def test_a_complete_answer_of_thoughts_alone_has_a_message(
    reason: Literal["stop", "length"], kinds: list[str]
) -> None:
    items, request = AnswerItems({}), Mock(prompt_tokens=1, cached_tokens=0, new_tokens=2)
    items.add(Thought("Hm."), request)
    items.add(End(reason, None), request)
    assert [part["type"] for part in items.whole["output"]] == kinds


def test_messages(url: str) -> None:
    asked = ASKED | {"messages": TURNS, "max_tokens": 11}
    told = httpx2.post(f"{url}/v1/messages", json=asked, timeout=60).json()
    thinking = {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert told["content"] == [thinking, {"type": "text", "text": ANSWER}]
    stream = httpx2.post(f"{url}/v1/messages", json=asked | {"stream": True}, timeout=60).text
    assert '"thinking_delta"' in stream and '"text_delta"' in stream
    answer = {"role": "assistant", "content": told["content"]}
    asked["messages"] = [*TURNS, answer, *TURNS]
    assert httpx2.post(f"{url}/v1/messages", json=asked, timeout=60).status_code == 200


def test_completions_have_the_text_alone(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASKED, prompt=FRANCE, max_tokens=11).choices[0]
    assert whole.text == f" {THOUGHT} country {ANSWER}"


def test_items_of_one_answer_are_one_message() -> None:
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    said = {"type": "message", "role": "assistant", "content": "Yes."}
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    body = msgspec.convert({"input": [thought, said, thought, call, said]}, Body)
    first, second = messages_of(body)
    assert first == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert (second["content"], second["reasoning_content"]) == ("Yes.", "Hm.")
    assert second["tool_calls"][0]["id"] == "c"
