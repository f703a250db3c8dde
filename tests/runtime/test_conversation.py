"""Conversations: what stays in messages, and what a turn gives to the model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from chats import MARKED, thinking, write_chat_bundle
from contract import refused
from installed import DEMO
from loading import load_fixed

import stem_edge
from stem_edge import Chunk, Model
from stem_edge.errors import InputError

FRANCE, SPAIN = "The capital of France is", "The capital of Spain is"
PARIS = " Paris. It is a country in Europe."
SENTENCE: Any = {"max_new_tokens": 10, "stop": ["Europe."]}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def text_of(chunks: Iterator[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bundle = write_chat_bundle(tmp_path_factory.mktemp("chat"))
    # Its thread must exist before the tests, or no_leaks takes it for one of theirs.
    with load_fixed(bundle, context_length=64) as model:
        text_of(model.conversation().send(FRANCE, max_new_tokens=2))
        yield model


@pytest.fixture
def asked(loaded: Model, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Prompts that conversations give to the model."""
    return noting(loaded, monkeypatch)


def noting(model: Model, patch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Note the prompts that conversations of a model give to it."""
    prompts, real = list[Sequence[int]](), model.generate

    def generate(prompt: Sequence[int], *args: Any, **options: Any) -> Any:
        prompts.append(prompt)
        return real(prompt, *args, **options)

    patch.setattr(model, "generate", generate)
    return prompts


def test_each_turn_is_what_generate_gives_for_all_messages(
    loaded: Model, asked: list[Sequence[int]]
) -> None:
    with loaded.conversation() as conversation:
        first = text_of(conversation.send(FRANCE, **SENTENCE))
        assert PARIS.startswith(first) and first.startswith(" Paris.")
        second = text_of(conversation.send(SPAIN, stem_edge.SamplingParams(max_new_tokens=2)))
        assert loaded.stats.new_tokens == 2
        expected = [user(FRANCE), assistant(first), user(SPAIN), assistant(second)]
        assert conversation.messages == expected
    rendered = loaded.chat_prompt(expected[:3])
    assert rendered == f"<|begin_of_text|>{FRANCE}{first} {SPAIN}"
    ids = loaded.tokenize(rendered)
    assert [ids.count(1500), asked[1]] == [1, ids]
    assert loaded.generate_text(rendered, max_new_tokens=2) == second


def test_undo_and_retry(loaded: Model, asked: list[Sequence[int]]) -> None:
    given = [{"role": "system", "content": "Be short. "}, user(FRANCE), assistant(" Rome.")]
    conversation = loaded.conversation(given)
    answer = text_of(conversation.retry(max_new_tokens=3))
    assert answer.startswith(" Paris")
    assert conversation.messages == [*given[:2], assistant(answer)]
    assert given[2]["content"] == " Rome."  # the caller's list is the caller's
    text_of(conversation.send(SPAIN, max_new_tokens=2))
    assert conversation.undo() == SPAIN
    assert conversation.messages == [*given[:2], assistant(answer)]
    assert conversation.undo() == FRANCE
    assert conversation.messages == given[:1]
    refused(conversation.undo, InputError, "no message of the user yet")
    refused(conversation.retry, InputError, "no message of the user yet")
    assert len(asked) == 2


def test_an_answer_that_is_cut_short_stays_as_far_as_it_came(loaded: Model) -> None:
    conversation = loaded.conversation()
    chunks = conversation.send(FRANCE)
    seen = next(chunks).text + next(chunks).text
    chunks.close()
    assert conversation.messages == [user(FRANCE), assistant(seen)]
    seen = next(conversation.retry()).text  # drops the iterator
    assert conversation.messages == [user(FRANCE), assistant(seen)]
    # One that is still held ends when the next begins, and adds nothing more.
    held = conversation.retry()
    kept = assistant(next(held).text)
    chunks = conversation.send(SPAIN)
    assert conversation.messages == [user(FRANCE), kept]
    next(chunks)
    assert next(held, None) is None
    assert conversation.messages[:3] == [user(FRANCE), kept, user(SPAIN)]
    conversation.close()
    assert next(chunks, None) is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_interrupt_keeps_what_was_handed_out(
    loaded: Model, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    real = loaded.generate

    def ctrl_c(*args: Any, **options: Any) -> Iterator[Chunk]:
        yield from islice(real(*args, **options), count)
        raise KeyboardInterrupt

    whole = text_of(loaded.conversation().send(FRANCE, max_new_tokens=8))
    monkeypatch.setattr(loaded, "generate", ctrl_c)
    conversation, seen = loaded.conversation(), ""
    with pytest.raises(KeyboardInterrupt):
        for chunk in conversation.send(FRANCE, max_new_tokens=8):
            seen += chunk.text
    assert whole.startswith(seen)
    assert bool(seen) == bool(count)
    # Nothing is kept of a turn without any answer, so that it can be sent again.
    assert conversation.messages == ([user(FRANCE), assistant(seen)] if seen else [])


def test_messages_that_are_refused_are_not_kept(loaded: Model) -> None:
    conversation = loaded.conversation()
    text_of(conversation.send(FRANCE, max_new_tokens=2))
    before = [dict(message) for message in conversation.messages]
    long = SPAIN * 20
    count = len(loaded.tokenize("".join([*(m["content"] for m in before), " ", long])))
    said = f"has {count} tokens, the context holds 64; undo turns", "context_length (up to 256)"
    refused(lambda: conversation.send(long), InputError, *said)
    texts: list[Any] = ["<|fim_prefix|>", 3, None, "x" * (1 << 20)]
    for text in texts:
        refused(partial(conversation.send, text), InputError)
    refused(lambda: conversation.send(SPAIN, temperature=-1), InputError, "temperature")
    assert conversation.messages == before
    conversation.messages.append(user("and"))
    refused(lambda: conversation.send(SPAIN), InputError, "refuses these messages: answer first")
    messages: list[Any] = [[{"role": "root", "content": ""}], "text", [user(FRANCE), 3]]
    for wrong in messages:
        refused(partial(loaded.conversation, wrong), InputError)


def test_without_a_template_contents_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with load_fixed(DEMO) as model:
        asked = noting(model, monkeypatch)
        assert not model.has_chat_template
        conversation = model.conversation()
        answer = text_of(conversation.send(FRANCE, max_new_tokens=3))
        text_of(conversation.send(" <|fim_prefix|>", max_new_tokens=1))
        joined = model.tokenize(f"{FRANCE}{answer} <|fim_prefix|>")
        assert asked == [model.tokenize(FRANCE), joined]
        assert 1502 not in joined
        refused(lambda: model.conversation().send(""), InputError, "the messages have no text")
    refused(lambda: conversation.send(SPAIN), InputError, "closed")


def test_the_process_of_the_template_outlives_ctrl_c(tmp_path: Path) -> None:
    with load_fixed(write_chat_bundle(tmp_path, MARKED)) as model:
        assert model.has_chat_template
        model.chat_prompt([user(FRANCE)])
        worker = model.chat._template._worker._process  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGINT)
        assert model.chat_prompt([user(FRANCE)])
        assert worker.poll() is None


def test_thoughts_are_kept_beside_their_answer(tmp_path: Path) -> None:
    with thinking(tmp_path) as bundle, load_fixed(bundle) as model:
        conversation = model.conversation()
        chunks = list(conversation.send(FRANCE, max_new_tokens=11))
        thoughts, text = "".join(chunk.thoughts for chunk in chunks), text_of(iter(chunks))
        assert (thoughts, text) == ("Paris. It is a", "in Europe.")
        answer = {**assistant(text), "reasoning_content": thoughts}
        assert conversation.messages == [user(FRANCE), answer]
        model.save_conversation(tmp_path / "talk", conversation)
        assert model.load_conversation(tmp_path / "talk").messages == [user(FRANCE), answer]
        # What a grammar allows is the answer from its first token on.
        assert text_of(conversation.retry(regex=" Paris")) == " Paris"
