"""Rows through the scheduler: failures of some, rows that come late, the end of a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stem_edge.batches.meter import Meter
from stem_edge.batches.rows import InputRow, Result, named
from stem_edge.batches.run import answer
from stem_edge.batches.settings import Settings
from stem_edge.errors import DeviceLostError, InputError, RowReadError, StemEdgeError
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.model import Model

SETTINGS = Settings({"max_new_tokens": 6})
THREE = {
    "custom_id": "three",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "The capital of Peru is", "n": 3, "max_tokens": 6, "temperature": 0},
}


def row(line: int, **fields: Any) -> InputRow:
    """Return a row of fields."""
    return named(json.dumps(fields).encode(), line)


def failing(patch: pytest.MonkeyPatch, error: StemEdgeError, at: int) -> None:
    """Raise an error at the at-th token of all that answers to Peru have."""
    choose, count = Request.choose, iter(range(1000))

    def fails(request: Request, logits: Any) -> None:
        if request.prompt == peru and next(count) == at:
            raise error
        choose(request, logits)

    peru: list[int] = []
    make = Model.request

    def noted(model: Model, prompt: Any, *given: Any, **more: Any) -> Request:
        made = make(model, prompt, *given, **more)
        if prompt == THREE["body"]["prompt"]:  # type: ignore[index]
            peru[:] = made.prompt
        return made

    patch.setattr(Request, "choose", fails)
    patch.setattr(Model, "request", noted)


@pytest.mark.parametrize("at", [0, 1, 7, 17])
def test_an_answer_that_fails_ends_its_row_alone(
    at: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, RowReadError("flash: bad record"), at)
    rows = [row(1, prompt="Cuba lies in"), row(2, **THREE), row(3, prompt="Oman lies in")]
    found = {result.id: result for result in answer(model, rows, SETTINGS)}
    assert {id: result.failed for id, result in found.items()} == {
        1: False,
        "three": True,
        3: False,
    }
    response = json.loads(found["three"].data)["response"]
    assert response["status_code"] == 500
    assert response["body"]["error"]["message"] == "flash: bad record"


def test_a_lost_device_ends_the_batch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DeviceLostError("gone"), 2)
    with pytest.raises(DeviceLostError, match="gone"):
        list(answer(model, [row(1, **THREE), row(2, prompt="Oman lies in")], SETTINGS))


def test_a_closed_model_answers_no_row(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    def closed() -> None:
        raise InputError("the model is closed")

    answers = answer(model, [row(1, prompt="a")], SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "check_usable", closed)
        with pytest.raises(InputError, match="the model is closed"):
            next(answers)


def test_rows_that_are_not_there_yet_hold_nobody(model: Model) -> None:
    done = list[Result]()

    def rows() -> Iterator[InputRow | None]:
        yield row(1, prompt="Cuba lies in")
        while not done:
            yield None
        yield row(2, prompt="Oman lies in")

    found = answer(model, rows(), SETTINGS)
    done.append(next(found))
    done += found
    assert [result.id for result in done] == [1, 2]


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(100, show=False)
    monkeypatch.setattr(Meter, "seconds", 10.0)
    meter.skipped = 40
    for number in range(5):
        meter.add(Result(number, number, b"", failed=number == 0, tokens=20 if number else 0))
    assert meter.line() == "45/100 rows, 1 errors, 8 tokens/s, 2 min left"
    assert Meter(None, show=False).line() == "0 rows, 0 tokens/s"
