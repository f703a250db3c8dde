"""Bars of progress."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

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


def test_without_a_terminal_long_parts_are_told_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(progress, "LINE_AFTER", 0.02)

    def after(seconds: float) -> str:
        clock[0] += seconds
        deadline, told = time.monotonic() + 60, ""
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
            told = capsys.readouterr().err
        return told.removeprefix("stem-edge: ")

    with Progress(0, "exporting", None) as bar:  # over before its line
        bar.begin("comparing")
        assert after(0.5) == "comparing\n"
        bar.begin("writing weights", 3000, layers=30)
        bar.advance(1500)
        assert after(4) == "writing weights: layer 15 of 30, about 4 s left\n"
        bar.begin("checking files", 4000)
        bar.advance(1000)
        assert after(1) == "checking files: 25%, about 3 s left\n"
        assert after(progress.LINE_EVERY) == "checking files: 25%, about 33 s left\n"
        bar.begin("choosing types", 30, layers=30)
        bar.advance(30)
        assert after(9) == "choosing types: layer 30 of 30\n"
        clock[0] += progress.LINE_EVERY
        time.sleep(0.1)  # in which the same line would come again
        bar.begin("comparing")
        assert after(9) == "comparing\n"
