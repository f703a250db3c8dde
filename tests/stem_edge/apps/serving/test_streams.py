"""Streams over sockets: kept open while nothing comes, read slowly, and many at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NoReturn

import pytest
from servers import Connection, Steps, compute_of, wait_for
from starlette.applications import Starlette

from stem_edge.apps.answers.events import AnswerEvents, Text
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.apps.serving import app, reply
from stem_edge.runtime.model import Model
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.scheduling.request import Chunk

ASKED = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def program(model: Model) -> Starlette:
    return app(model, waiting=50)


def test_comments_while_nothing_comes(
    port: int, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_SECONDS", 0.05)
    steps.hold()
    waiting = Connection(port, "/v1/completions", ASKED | {"stream": True})
    waiting.read_until(b"\r\n:\n\n\r\n")
    steps.release()
    got = waiting.read_all()
    assert b"Par" in got
    assert b"data: [DONE]\n\n" in got


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_that_cannot_be_read_ends_the_stream(
    program: Starlette,
    port: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(events: AnswerEvents, chunk: Chunk) -> NoReturn:
        raise TypeError("a secret")

    monkeypatch.setattr(AnswerEvents, "push", fail)
    asking = Connection(port, "/v1/completions", ASKED | {"stream": True, "n": count})
    asking.read_until(b"the server failed")
    assert b"secret" not in asking.read_all()
    assert "a secret" in caplog.text
    wait_for(lambda: compute_of(program).busy == 0)


def test_a_stream_that_nobody_reads_ends(model: Model) -> None:
    held, left, request = [0], list[object](), model.request("a")

    def hold(nbytes: int) -> None:
        held[0] += nbytes
        if held[0] > 5 * reply.TOKEN_NBYTES:
            raise RefusalError("too much")

    async def ask() -> None:
        replies = reply.Replies(left.append, hold)
        deliver = replies.add(reply.Reply(request, AnswerEvents(), RowCounters()))
        events = replies.events()
        for waiting in (1, 5, 20):
            for _ in range(waiting):
                deliver(Chunk("a", [1], None, None))
            assert [await anext(events) for _ in range(waiting)] == [(0, Text("a"))] * waiting

    with pytest.raises(RefusalError):
        asyncio.run(ask())
    assert left == [request] and held[0] <= 6 * reply.TOKEN_NBYTES


@pytest.mark.slow
def test_200_connections_at_once(program: Starlette, port: int, model: Model) -> None:
    text = model.generate_text("The capital of France is", max_new_tokens=12).encode()
    everybody = [Connection(port, "/v1/completions", ASKED) for _ in range(200)]
    answers = [connection.read_all() for connection in everybody]
    counts = Counter(answer.split(b" ", 2)[1] for answer in answers)
    assert counts.keys() <= {b"200", b"429"}
    assert counts[b"200"] >= 58  # which can run or wait
    assert all(text in answer for answer in answers if b" 200 " in answer)
    wait_for(lambda: compute_of(program).busy == 0)
