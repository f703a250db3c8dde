"""A log of which equal errors are one line a minute."""

from __future__ import annotations

import logging
import time

import pytest

from stem_edge.answers.refusals import public
from stem_edge.errors import BackendError, BundleError, StemEdgeError
from stem_edge.serving.connections.quiet_log import SECONDS, quiet_log

log = logging.getLogger("a library")


def fail(number: int) -> None:
    log.error("no file %d", number)
    try:
        [][number]
    except IndexError:
        log.exception("no %d", number)


def test_one_line_a_minute_for_one_cause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with quiet_log():
        for number in range(100):
            fail(number)
        now += SECONDS
        fail(100)
        fail(101)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("ERROR: ")] == [
        "ERROR: no file 0",
        "ERROR: no 0",
        "ERROR: no file 100 (and 99 times before)",
        "ERROR: no 100 (and 99 times before)",
        "ERROR: no file 101",
        "ERROR: no 101",
    ]
    assert "Traceback" in said[2]


def raised(error: StemEdgeError) -> StemEdgeError:
    try:
        raise error
    except StemEdgeError as caught:
        return caught


def test_errors_of_other_types_and_places_are_other_causes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with quiet_log():
        for number in range(3):
            public(raised(BundleError(f"bundle {number}")))
            public(raised(BackendError(f"state {number}")))
            public(BackendError(f"elsewhere {number}"))
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "ERROR: bundle 0",
        "ERROR: bundle 2 (and 1 times before)",
        "ERROR: elsewhere 0",
        "ERROR: elsewhere 2 (and 1 times before)",
        "ERROR: state 0",
        "ERROR: state 2 (and 1 times before)",
    ]
