"""Thoughts of a model in answers, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from chats import thinking
from loading import load_fixed
from servers import serving

from stem_edge.apps.serving import app

FRANCE = "The capital of France is"
ASKED: dict[str, Any] = {"model": "m", "temperature": 0}
TURNS: Any = [{"role": "user", "content": FRANCE}]
THOUGHT, ANSWER = "Paris. It is a", "in Europe."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        thinking(tmp_path_factory.mktemp("chat")) as bundle,
        load_fixed(bundle) as model,
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


def test_completions_have_the_text_alone(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASKED, prompt=FRANCE, max_tokens=11).choices[0]
    assert whole.text == f" {THOUGHT} country {ANSWER}"
