"""`stem-edge fit`: what fits, what does not, and that a load decides alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main
from stem_edge.shown import parse_size

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, whose memory counts."""
    command = [sys.executable, "-m", "stem_edge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_load_decides_alike(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("stem_edge.runtime.load_plan.own_memory", lambda: 30_000_000)
    for memory in (50_000_000, 52_000_000, 90_000_000):
        assert main(["fit", str(DEMO), "--memory", str(memory), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        plan = stem_edge.memory_plan(DEMO, memory)
        assert found["plan"] == asdict(plan) | {"total": plan.total}
        assert found["memory"] == plan.total + found["mapped"] <= memory


def test_the_first_line_says_if_it_fits_and_the_least_that_is_named_suffices() -> None:
    small = ["fit", str(DEMO), "--context-length", "64", "--memory"]
    refused = run(*small, "20MB")
    assert refused.returncode == 1 and refused.stdout.splitlines()[0] == "does not fit"
    least = re.search(r"at least ([\d.]+ MB)", " ".join(refused.stdout.split()))
    assert least
    enough = f"{parse_size(least[1]) + 1_500_000}"
    accepted = run(*small, enough)
    assert accepted.returncode == 0, accepted.stdout
    lines = accepted.stdout.splitlines()
    assert lines[0].startswith("fits into ")
    words = lines[-1].split()
    assert words[:2] == ["stem-edge", "generate"]
    done = run(*words[1:], "-n", "1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context-length", "100000"], "is 100000; this model takes 1 to 256"),
        (["--memory", "much"], "not understood"),
        (["--sequences", "0"], "sequences is 0; expected 1 to 128"),
        (["--threads", "0"], "threads is 0"),
    ],
    ids=str,
)
def test_bad_input(options: list[str], message: str, capsys: Capture) -> None:
    assert main(["fit", str(DEMO), *options]) == 1
    assert message in capsys.readouterr().err


def test_the_command(capsys: Capture) -> None:
    assert main(["fit", str(DEMO), "--memory", "1.2GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["slots"] == 1756
    main(["prepare", str(DEMO), "--json", "-t", "1"])
    capsys.readouterr()
    assert main(["fit", str(DEMO), "--memory", "9MB", "--json"]) == 1
    assert re.search("at least .*, or .* with mapped weights, which fit", capsys.readouterr().err)
