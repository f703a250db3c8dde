"""The command stem-edge batch."""

from __future__ import annotations

import json
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
    assert "no row was left to run; 1 error among 2 results (line 2:" in capsys.readouterr().err
    output.write_text(output.read_text().splitlines(True)[1])
    assert main(command) == 0
    assert "1 row, 3 tokens in" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_says_how_to_go_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "batch", interrupted)
    assert main(["batch", str(DEMO), "in", "out"]) == 130
    assert "interrupted; out has what is complete" in capsys.readouterr().err
