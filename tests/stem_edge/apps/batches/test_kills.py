"""A batch that is killed, again and again: the same results as of one that is not, each once."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import DEMO, ENGLISH
from programs import HEEDING

# Ctrl-C is ignored in what a script starts in the background, and so in what that starts.
PLACES = ["France", "Spain", "Peru", "Chile", "Italy", "Japan", "Kenya", "Norway", "Oman", "Cuba"]


def prompts(count: int) -> list[dict[str, object]]:
    """Return rows of many lengths, every third of them sampled."""
    chance = random.Random(1)
    words = re.findall("[A-Za-z]{2,}", ENGLISH.read_text("utf-8"))

    def row(number: int) -> dict[str, object]:
        place, some = chance.choice(PLACES), chance.choices(words, k=chance.randint(1, 30))
        prompt = chance.choice([f"The capital of {place} is", f"{place} lies in", " ".join(some)])
        sampled = {} if number % 3 else {"temperature": 0.8}
        return {"id": number, "prompt": prompt, "max_new_tokens": chance.randint(2, 16)} | sampled

    return [row(number) for number in range(count)]


def run(source: Path, output: Path, kill_at: int | None = None) -> int:
    """Run the command, and kill it once so many results are there; return how many are."""
    process = subprocess.Popen(_command(source, output))
    while kill_at is not None and process.poll() is None and _count(output) < kill_at:
        time.sleep(0.002)
    if kill_at is not None:
        process.kill()
    assert process.wait(600) == (0 if kill_at is None else -9)
    return _count(output)


def _command(source: Path, output: Path) -> list[str]:
    options = ["batch", DEMO, source, output, "-q"]
    return [sys.executable, "-c", HEEDING, *map(str, options)]


def _count(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def _texts(output: Path) -> dict[int, str]:
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert Counter(each["id"] for each in found).most_common(1)[0][1] == 1
    return {each["id"]: each["text"] for each in found}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_writes_what_is_complete(written: Callable[..., Path], tmp_path: Path) -> None:
    source, output = written(*prompts(2000)), tmp_path / "out"
    process = subprocess.Popen(_command(source, output), stderr=subprocess.PIPE, text=True)
    while _count(output) < 20 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert (
        told
        == f"stem-edge: interrupted; {output} has what is complete, and the same command goes on\n"
    )
    assert 20 <= len(_texts(output)) == _count(output) < 2000
    assert output.read_bytes().endswith(b"\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills")
def test_killed_twice(written: Callable[..., Path], tmp_path: Path) -> None:
    source, chance = written(*prompts(300)), random.Random(3)
    run(source, tmp_path / "whole")
    first = run(source, tmp_path / "killed", kill_at=chance.randint(1, 130))
    second = run(source, tmp_path / "killed", kill_at=first + chance.randint(1, 130))
    assert 0 < first < second < 300
    run(source, tmp_path / "killed")
    assert _texts(tmp_path / "killed") == _texts(tmp_path / "whole")
    assert len(_texts(tmp_path / "whole")) == 300
