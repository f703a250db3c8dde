"""Mutants of valid files: each is read or refused as the contract says, and nothing else happens.

These runs are short and have a fixed seed; `python tools/fuzz.py TARGET` is the long one. Its findings
go into tests/data/fuzz/TARGET, which is replayed here.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzzing.mutants import mutants
from fuzzing.running import SEEDS, FaultError, Runner
from fuzzing.targets import TARGETS, chat_process
from installed import ROOT

pytestmark = pytest.mark.slow

SECONDS = 3.0  # for each target
FINDING = "finding-"
SEED_FILES = [(name, path) for name in TARGETS for path in sorted((SEEDS / name).iterdir())]
needs_timers = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="needs interval timers, which Windows lacks"
)


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    """A runner of the target that the parameter names."""

    def too_slow(*_: object) -> None:
        raise TimeoutError("an input took too long")

    before = signal.signal(signal.SIGALRM, too_slow)
    yield Runner(TARGETS[request.param], tmp_path, tmp_path / "findings")
    chat_process.cache_clear()
    signal.signal(signal.SIGALRM, before)


@needs_timers
@pytest.mark.parametrize(
    ("runner", "path"),
    SEED_FILES,
    indirect=["runner"],
    ids=[f"{n}-{p.name}" for n, p in SEED_FILES],
)
def test_seeds_are_accepted_and_findings_are_refused(runner: Runner, path: Path) -> None:
    how = runner.run(path.read_bytes())
    assert how == "accepted" or path.name.startswith(FINDING)


@needs_timers
@pytest.mark.parametrize(("runner", "name"), [(n, n) for n in TARGETS], indirect=["runner"])
def test_mutants_are_read_or_refused(runner: Runner, name: str) -> None:
    """Manifests and edits that are accepted must also survive being written and read again."""
    seeds = [path.read_bytes() for path in (SEEDS / name).iterdir()]
    end = time.monotonic() + SECONDS
    for data in mutants(TARGETS[name].change, Random(8), seeds):
        runner.run(data)
        if time.monotonic() > end or runner.executions >= 20_000:
            break
    assert runner.executions > 20
    assert runner.accepted > 0
    assert (len(runner.refused_at) > 1) is TARGETS[name].refuses


@needs_timers
def test_a_reader_that_fails_is_found_and_its_input_made_small(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        if b"bad" in path.read_bytes():
            raise IndexError("outside")

    target = TARGETS["edit"]._replace(read=read)
    runner = Runner(target, tmp_path, tmp_path / "found")
    assert runner.run(b"good") == "accepted"
    with pytest.raises(
        FaultError, match=r"finding-\w+: IndexError at .*test_fuzz\.py:\d+: 'outside'"
    ):
        runner.run(b"x" * 5000 + b"bad, bad" + b"y" * 300)
    (path,) = (tmp_path / "found").iterdir()
    assert path.read_bytes() == b"bad"


@needs_timers
def test_the_command_runs_a_target_and_an_input_by_itself(tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        program = ROOT / "tools" / "fuzz.py"
        command: list[str | Path] = [sys.executable, program, *map(str, arguments)]
        command += ["--findings", tmp_path]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return str(done.stdout)

    counts = re.match(r"edit: 300 inputs in \d+ s, (\d+) accepted", run("edit", "--runs", 300))
    assert counts is not None and 0 < int(counts[1]) < 300
    assert not list((tmp_path / "edit").iterdir())
    (tmp_path / "input").write_bytes(b"nothing")
    assert run("edit", "--replay", tmp_path / "input").startswith("refused: ")
    assert len(run("--list").splitlines()) == len(TARGETS)
