"""`stem-edge eval`, as tables and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conformance import CHECKPOINT, TEXT
from installed import DEMO

import stem_edge
from stem_edge.apps.measuring.quality.quality import Quality
from stem_edge.commands.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 3)
    return path


@pytest.mark.slow
def test_the_command_prints_tables(text: Path, tmp_path: Path, capsys: Capture) -> None:
    types: list[Any] = ["fp32", "int4"]
    for kind in types:
        stem_edge.export_bundle(CHECKPOINT, tmp_path / kind, type=kind, rows=kind)
    exact, small = (str(tmp_path / kind) for kind in types)
    arguments = ["--text", str(text), "--against", str(CHECKPOINT)]
    assert main(["eval", exact, small, *arguments, "--window", "64"]) == 0
    out = capsys.readouterr().out  # stderr has the progress, if it takes seconds
    size = len((TEXT * 3).encode())
    assert f"1 document of {size} bytes" in out
    assert "windows of 64 tokens, one every 32; computed by onnxruntime" in out
    assert f"divergence from the reference {CHECKPOINT}, nats per token" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(small)]
    assert rows[0][2].endswith("%")  # change of perplexity
    assert rows[1][4].endswith("%")  # agreement


def test_the_command_compares_with_the_first_bundle(text: Path, capsys: Capture) -> None:
    assert main(["eval", str(DEMO), f"{DEMO}/.", "--text", str(text)]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if str(DEMO) in line)
    assert (len(first.split()), second.split()[2]) == (3, "+0.00%")


def test_the_command_prints_json(text: Path, capsys: Capture) -> None:
    arguments = ["--text", str(text), "--against", str(DEMO), "--json", "--lines"]
    assert main(["eval", str(DEMO), *arguments]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found.keys() == Quality.__dataclass_fields__.keys()
    assert found["documents"] == 3
    assert found["divergence"]["agreement"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text.txt: cannot read (No such file or directory)"),
        (b"caf\xe9 noir", "text.txt: not UTF-8 (byte 3: invalid continuation byte)"),
        (b"", "too few tokens"),
    ],
)
def test_the_command_refuses_a_bad_file(
    tmp_path: Path, capsys: Capture, content: bytes | None, message: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["eval", str(DEMO), "--text", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
