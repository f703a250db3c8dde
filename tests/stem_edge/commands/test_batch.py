"""The command stem-edge batch."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO

from stem_edge.commands.main import main
from stem_edge.commands.running import batch

Capture = pytest.CaptureFixture[str]


def test_it_answers_once_and_tells_of_errors(capsys: Capture, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "The capital of France is"}\n{"prompt": "a", "top_p": 7}\n')
    command = ["batch", str(DEMO), str(source), str(output), "-n", "3"]
    assert main([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["answered"], found["failed"], found["tokens"]) == (1, 1, 3)
    error, answer = map(json.loads, output.read_text().splitlines())
    assert "top_p" in error["error"]["message"]
    assert answer["text"].startswith(" Paris")
    output.unlink()
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "; 1 error among 2 results (line 2: top_p is 7; " in told
    source.write_text(source.read_text().replace("7", "1"))
    assert main(command) == 1  # ids decide: the row is done
    assert (
        "no row was left to run; 1 error among 2 results; --retry-errors" in capsys.readouterr().err
    )
    assert main([*command, "--retry-errors"]) == 0
    assert "1 row, 3 tokens in" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_rows_of_stdin(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}')))
    output = tmp_path / "out.jsonl"
    assert main(["batch", str(DEMO), "-", str(output), "-n", "1", "-q"]) == 0
    assert json.loads(output.read_text())["id"] == 1


def test_an_interrupt_says_how_to_go_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "batch", interrupted)
    assert main(["batch", str(DEMO), "in", "out"]) == 130
    assert "interrupted; out has what is complete" in capsys.readouterr().err
