"""Mutants of valid files: each is read or refused as the contract says, and nothing else happens.

These runs are short and have a fixed seed; `python tools/fuzz.py TARGET` is the long one. Its findings
go into tests/data/fuzz/TARGET, which is replayed here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzzing.mutants import mutants
from fuzzing.running import SEEDS, Runner
from fuzzing.targets import TARGETS, chat_process

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
    assert bool(runner.refused_at) is TARGETS[name].refuses
