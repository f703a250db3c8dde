"""Bars of progress."""

from __future__ import annotations

import re
import threading
import time

import pytest

from stem_edge import progress
from stem_edge.progress import Progress


def test_parts_have_bars_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, "exporting", True) as bar:
        bar.begin("writing weights", 4000, layers=30)
        bar.begin("writing tables", 4000)
        bar.begin("comparing")
    told = capsys.readouterr().err
    assert "writing weights:   0%" in told
    assert "0 of 30 layers, ? left" in told
    assert "writing tables:   0%" in told
    assert told.index("exporting") < told.index("writing weights") < told.index("comparing")


def test_bytes_are_shown_as_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, "exporting", True) as bar:
        bar.begin("writing weights", 3000, layers=30)
        time.sleep(0.15)  # as often as a bar is drawn
        bar.advance(1500)
    assert re.search(
        r"writing weights:  50%.* 15 of 30 layers, 00:0\d left", capsys.readouterr().err
    )


def test_nothing_is_shown_where_nobody_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100, "exporting", False) as bar:
        bar.advance(50)
        bar.begin("writing weights", 3000, layers=30)
    assert capsys.readouterr().err == ""


def test_without_a_terminal_long_parts_are_told_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_AFTER", 0.2)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.4)
    with Progress(0, "exporting", None) as bar:  # over before its line
        bar.begin("comparing")
        time.sleep(0.5)
        bar.begin("writing weights", 3000, layers=30)
        bar.advance(1500)
        time.sleep(0.35)
        bar.begin("checking files", 4000)
        bar.advance(1000)
        time.sleep(0.8)
        bar.begin("choosing types", 30, layers=30)
        bar.advance(30)
        time.sleep(0.35)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "stem-edge: comparing"
    assert re.fullmatch(r"stem-edge: writing weights: layer 15 of 30, about \d s left", told[1])
    assert told[4:] == ["stem-edge: choosing types: layer 30 of 30"]
    for line in told[2:4]:
        assert re.fullmatch(r"stem-edge: checking files: 25%, about \d s left", line)


def test_a_process_that_stood_still_tells_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = 0.0, threading.Semaphore(0)

    def monotonic() -> float:
        looked.release()
        return now

    monkeypatch.setattr(progress, "LINE_AFTER", 0.01)
    monkeypatch.setattr(time, "monotonic", monotonic)
    with Progress(0, "exporting", None):
        now = 1000 * progress.LINE_EVERY
        for _ in range(10):
            assert looked.acquire(timeout=60)
    assert capsys.readouterr().err == "stem-edge: exporting\n"
