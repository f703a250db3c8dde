"""Mutants of valid files: each is read or refused as the contract says, and nothing else happens.

Here a short run with a fixed seed; `python tools/fuzz.py TARGET` is the long one. What it finds goes
into tests/data/fuzz/TARGET and is run here for ever.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fuzz
import pytest
from fuzzing.mutants import join, split
from fuzzing.running import FaultError, Order, Runner, explore
from fuzzing.targets import SEEDS, TARGETS, seeds_of

pytestmark = pytest.mark.slow

SECONDS = 3.0  # of a short run at most
FINDING = "finding-"
SEED_FILES = [(name, path) for name in TARGETS for path in sorted((SEEDS / name).iterdir())]
needs_timers = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="needs interval timers, which Windows has not"
)


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    """A target that is ready; the parameter is its name."""

    def too_slow(*_: object) -> None:
        raise TimeoutError("an input took too long")

    before = signal.signal(signal.SIGALRM, too_slow)
    with ExitStack() as end:
        read = TARGETS[request.param].prepare(tmp_path, end)
        yield Runner(read, tmp_path, tmp_path / "findings")
    signal.signal(signal.SIGALRM, before)


@needs_timers
@pytest.mark.parametrize(
    ("runner", "path"),
    SEED_FILES,
    indirect=["runner"],
    ids=[f"{n}-{p.name}" for n, p in SEED_FILES],
)
def test_seeds_are_accepted_and_what_was_found_is_refused(runner: Runner, path: Path) -> None:
    how = runner.run(path.read_bytes())
    assert how == "accepted" or path.name.startswith(FINDING)


@needs_timers
@pytest.mark.parametrize(("runner", "name"), [(n, n) for n in TARGETS], indirect=["runner"])
def test_mutants_are_read_or_refused(runner: Runner, name: str, tmp_path: Path) -> None:
    order = Order(name, tmp_path, tmp_path / "findings", runs=20_000, seconds=SECONDS, seed=8)
    explore(runner, order, runner.run)
    assert runner.executions > 20
    assert runner.accepted > 0
    assert len(runner.ends) > 1


@needs_timers
def test_a_reader_that_fails_is_found_and_its_input_made_small(tmp_path: Path) -> None:
    seeds = seeds_of("zarr").values()

    def read(data: bytes) -> None:
        if data not in seeds:
            raise IndexError("outside")

    runner = Runner(read, tmp_path, tmp_path / "found")
    order = Order("zarr", tmp_path, tmp_path / "found", runs=20_000, seconds=60.0, seed=0)
    with pytest.raises(
        FaultError, match=r"finding-\w+: IndexError at .*test_fuzz\.py:\d+: 'outside'"
    ):
        explore(runner, order, runner.run)
    (path,) = (tmp_path / "found").iterdir()
    assert path.read_bytes() not in seeds


@needs_timers
def test_the_command_runs_a_target_and_an_input_by_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = ["--findings", str(tmp_path)]
    assert fuzz.main(["edit", "--runs", "300", "--json", *found]) == 0
    tally = json.loads(capfd.readouterr().out)
    assert tally["target"] == "edit" and tally["executions"] >= 300 > tally["accepted"] > 0
    (tmp_path / "input").write_bytes(b"nothing")
    assert fuzz.main(["edit", "--replay", str(tmp_path / "input"), *found]) == 0
    assert "refused: " in capfd.readouterr().out
    assert fuzz.main(["--list"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == len(TARGETS)


@pytest.mark.skipif(sys.platform != "linux", reason="the process is forked")
def test_an_input_that_ends_its_process_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(order: Order) -> None:
        (order.folder / "input").write_bytes(b"bad")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(fuzz, "work", crash)
    monkeypatch.setattr(fuzz, "START", "fork")
    order = Order("edit", tmp_path, tmp_path / "found", runs=1, seconds=9.0, seed=0)
    assert fuzz.run(order) == 1
    assert [path.read_bytes() for path in (tmp_path / "found").iterdir()] == [b"bad"]


def test_files_in_one_come_apart_again() -> None:
    files = {"zarr.json": b"{}", "c/0": b"== zarr.json 1\n", "records/c/0/0": b""}
    assert split(join(files)) == files
    assert split(b"no files") == {}
