"""A log of which equal errors are one line a minute."""

from __future__ import annotations

import logging
import time

import pytest

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
    ]
    assert "Traceback" in said[2]
