"""The compute thread: what it refuses, what fails there, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Any

import pytest
from servers import Connection, Steps, before_steps, client_of, compute_of, wait_for
from starlette.applications import Starlette

import stem_edge
from stem_edge.apps.serving import app
from stem_edge.errors import BundleError, DeviceLostError
from stem_edge.runtime.model import Model

ASKED: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def program(model: Model) -> Starlette:
    return app(model, sequences=1, waiting=1)


def test_a_full_queue_is_told_when_to_come_back(
    program: Starlette, steps: Steps, port: int
) -> None:
    steps.hold()
    taken = [Connection(port, "/v1/completions", ASKED) for _ in range(2)]
    wait_for(lambda: compute_of(program).busy == 2)
    refused = Connection(port, "/v1/completions", ASKED).read_all()
    assert b" 429 " in refused
    assert b"retry-after: 1" in refused.lower()
    assert b"rate_limit_error" in refused
    taken[1].leave()  # which makes room at once
    wait_for(lambda: compute_of(program).busy == 1)
    other = Connection(port, "/v1/completions", ASKED)
    wait_for(lambda: compute_of(program).busy == 2)
    steps.release()
    assert b"Paris" in taken[0].read_all()
    assert b"Paris" in other.read_all()


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 3},
        {"prompt": ["a"] * 3000},
        {"prompt": [[5]] * 3000, "echo": True, "logprobs": 1, "max_tokens": 0},
    ],
)
def test_more_answers_than_can_ever_wait_are_not_made(
    port: int, asked: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[object]()
    monkeypatch.setattr(model, "request", lambda *given: made.append(given))
    assert b" 400 " in Connection(port, "/v1/completions", ASKED | asked).read_all()
    assert not made


def test_texts_of_log_probabilities_are_made_beside_the_event_loop(
    port: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop, token_bytes = list[bool](), model.token_bytes

    def noted(token_id: int) -> bytes:
        in_loop.append(asyncio._get_running_loop() is not None)
        return token_bytes(token_id)

    monkeypatch.setattr(model, "token_bytes", noted)
    for stream in (True, False):
        asked = ASKED | {"logprobs": 5, "stream": stream}
        assert b" 200 " in Connection(port, "/v1/completions", asked).read_all()
    assert len(in_loop) > 12 and not any(in_loop)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_answers_under_way_are_told_of_the_end(
    program: Starlette, steps: Steps, port: int, stream: bool
) -> None:
    steps.hold()
    asking = Connection(port, "/v1/completions", ASKED | {"stream": stream})
    wait_for(lambda: compute_of(program).busy == 1)
    compute = compute_of(program)
    compute.draining = True
    assert b" 503 " in Connection(port, "/v1/completions", ASKED).read_all()
    ending = threading.Thread(target=compute.end)
    ending.start()
    wait_for(lambda: compute._ending)
    steps.release()
    ending.join()
    told = asking.read_all()
    assert b"the server has ended" in told
    assert (b" 503 " in told.split(b"\r\n")[0]) is not stream


def test_answers_are_finished_while_it_drains(program: Starlette, steps: Steps, port: int) -> None:
    steps.hold()
    asking = Connection(port, "/v1/completions", ASKED)
    wait_for(lambda: compute_of(program).busy == 1)
    compute_of(program).draining = True
    with client_of(program) as client:  # another loop of the same server
        health = client.get("/health")
        steps.release()
        assert b"Paris" in asking.read_all()
    assert (health.status_code, health.json()) == (503, {"status": "ending"})


def test_a_bundle_that_cannot_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Model:
        raise BundleError("/srv/bundle is damaged")

    program = app(fail)
    with client_of(program) as client:
        wait_for(lambda: compute_of(program).failure)
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "error")
        answer = client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 500
        assert "/srv" not in health.text + answer.text  # neither needs a key
        assert "/srv/bundle is damaged" in caplog.text


def test_while_it_loads(model: Model) -> None:
    gate = threading.Event()

    def load() -> Model:
        gate.wait(30)
        return stem_edge.load(model.bundle.path)

    program = app(load)
    with client_of(program) as client:
        assert client.get("/health").json() == {"status": "loading model"}
        refused = client.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gate.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        loaded = compute_of(program).model
        answer = client.post("/v1/completions", json=ASKED).json()
        assert answer["model"] == model.bundle.path.name
    with pytest.raises(stem_edge.errors.InputError, match="closed"):
        loaded.generate("a")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (DeviceLostError("the device is gone"), True),
        (RuntimeError("odd"), False),
        (BaseException("a panic"), True),
    ],
    ids=["device", "exception", "panic"],
)
def test_a_step_that_fails(
    model: Model, monkeypatch: pytest.MonkeyPatch, error: BaseException, lost: bool
) -> None:
    calls = count(1)

    def fail() -> None:
        if next(calls) == 2:
            raise error

    before_steps(monkeypatch, model, fail)
    program = app(model)
    with client_of(program) as client:
        wait_for(lambda: compute_of(program).loaded is not None)
        failed = client.post("/v1/completions", json=ASKED)
        assert failed.status_code == 500
        assert "the server failed" in failed.json()["error"]["message"]
        again = client.post("/v1/completions", json=ASKED)
        assert again.status_code == (500 if lost else 200)
        assert client.get("/health").status_code == (503 if lost else 200)
