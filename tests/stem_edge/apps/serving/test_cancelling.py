"""Clients that leave: what they cost, and that the others go on."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from servers import Connection, Steps, compute_of, wait_for
from starlette.applications import Starlette

from stem_edge.apps.serving import app
from stem_edge.runtime.model import Model

LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 200,
    "temperature": 0,
    "logit_bias": {},
    "seed": 1,
    "grammar": 'root ::= ("a " | "b ")+',  # so that it does not end by itself
}
PROMPT = list(range(5, 205))  # of several steps
TEXT = "The capital of France is"


@pytest.fixture
def program(model: Model) -> Starlette:
    return app(model, sequences=2, waiting=4)


def left(program: Starlette, count: int) -> bool:
    """Tell whether so many answers are under way."""
    return compute_of(program).busy == count


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("path", "body", "done"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, 0),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 200, "n": 2}, 0),
        ("/v1/completions", LONG | {"prompt": PROMPT}, 1),  # in its prompt
        ("/v1/completions", LONG | {"prompt": PROMPT}, 4),  # in its answer
    ],
)
def test_who_leaves_costs_a_step(
    program: Starlette, steps: Steps, port: int, model: Model,
    stream: bool, path: str, body: dict[str, Any], done: int,
) -> None:  # fmt: skip
    model.forget_prefixes()
    steps.hold()
    leaving = Connection(port, path, body | {"stream": stream})
    wait_for(lambda: left(program, body.get("n", 1)))
    steps.allow(done)
    before = steps.done
    leaving.leave()
    wait_for(lambda: left(program, 0))
    steps.release()
    wait_for(lambda: not compute_of(program).check(0)[1].busy)
    assert steps.done - before <= 2


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_others_go_on(
    program: Starlette, steps: Steps, port: int, stream: bool, model: Model
) -> None:
    expected = model.generate_text(TEXT, max_new_tokens=12)
    steps.hold()
    asked = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}
    staying = Connection(port, "/v1/completions", asked)
    wait_for(lambda: left(program, 1))
    leaving = [Connection(port, "/v1/completions", LONG | {"stream": stream}) for _ in range(3)]
    wait_for(lambda: left(program, 4))  # of which two have to wait
    steps.allow(4)
    for connection in leaving:
        connection.leave()
    wait_for(lambda: left(program, 1))
    steps.release()
    assert expected.encode() in staying.read_all()
    assert left(program, 0)


def test_who_leaves_before_the_end_of_the_request(
    program: Starlette, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", port), 30) as asking:
        asking.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
    done = Connection(port, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert b"200 OK" in done.read_all()
    assert not caplog.records
