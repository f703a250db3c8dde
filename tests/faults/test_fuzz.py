"""Mutants of valid files: each is read or refused as the contract says, and nothing else happens.

Here a short run with a fixed seed; `python tools/fuzz.py TARGET` is the long one. What it finds goes
into tests/data/fuzz/TARGET and is run here for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import fuzz
import msgspec
import pytest
from fuzzing.mutants import join, mutants, split
from fuzzing.running import SEEDS, FaultError, Runner
from fuzzing.targets import TARGETS, chat_process
from hypothesis import given, settings
from hypothesis import strategies as st

from stem_edge.bundle import Manifest, encode_manifest, parse_manifest
from stem_edge.edit_file import SCOPES, Edit, NewRows, Replacement, encode_edit, read_edit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 3.0  # of a short run at most
FINDING = "finding-"
SEED_FILES = [(name, path) for name in TARGETS for path in sorted((SEEDS / name).iterdir())]
INDICES = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5, unique=True)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
needs_timers = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="needs interval timers, which Windows has not"
)


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    """A target that is ready; the parameter is its name."""

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
def test_seeds_are_accepted_and_what_was_found_is_refused(runner: Runner, path: Path) -> None:
    how = runner.run(path.read_bytes())
    assert how == "accepted" or path.name.startswith(FINDING)


@needs_timers
@pytest.mark.parametrize(("runner", "name"), [(n, n) for n in TARGETS], indirect=["runner"])
def test_mutants_are_read_or_refused(runner: Runner, name: str) -> None:
    seeds = [path.read_bytes() for path in (SEEDS / name).iterdir()]
    end = time.monotonic() + SECONDS
    for data in mutants(TARGETS[name].change, Random(8), seeds):
        runner.run(data)
        if time.monotonic() > end or runner.executions >= 20_000:
            break
    assert runner.executions > 20
    assert runner.accepted > 0
    assert len(runner.ends) > 1


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

    tally = json.loads(run("edit", "--runs", 300, "--json"))
    assert tally["target"] == "edit" and tally["executions"] == 300 > tally["accepted"] > 0
    assert not list((tmp_path / "edit").iterdir())
    (tmp_path / "input").write_bytes(b"nothing")
    assert run("edit", "--replay", tmp_path / "input").startswith("refused: ")
    assert len(run("--list").splitlines()) == len(TARGETS)


@pytest.mark.skipif(sys.platform != "linux", reason="the process is forked")
def test_an_input_that_ends_its_process_is_kept(tmp_path: Path) -> None:
    target = TARGETS["edit"]._replace(read=lambda path: os.kill(os.getpid(), signal.SIGKILL))
    args = argparse.Namespace(target="edit", findings=tmp_path, guided=False, replay=None)
    vars(args).update(seed=0, runs=1, seconds=9.0)
    if not (child := os.fork()):
        try:
            fuzz.fuzz(args, target, tmp_path)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / "edit" / fuzz.RUNNING).read_bytes()


def test_files_in_one_come_apart_again() -> None:
    files = {"zarr.json": b"{}", "c/0": b"== zarr.json 1\n", "records/c/0/0": b""}
    assert split(join(files)) == files
    assert split(b"no files") == {}


COUNTS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ERRORS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    NAMES, st.builds(dict, worst=FLOATS, mean=FLOATS), max_size=3
)
REPORTS = st.fixed_dictionaries(
    {
        "checkpoint_nbytes": COUNTS,
        "backbone_nbytes": COUNTS,
        "tables_nbytes": COUNTS,
        "errors": ERRORS,
        "probe_tokens": st.lists(st.integers(0, 299), max_size=4),
        "worst_logit_difference": FLOATS,
        "greatest_logit": FLOATS,
        "divergence": FLOATS,
        "agreement": st.none() | FLOATS,
        "notes": st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=2),
    }
)
MODELS = st.fixed_dictionaries(
    {
        "norm_eps": st.floats(1e-9, 0.9),
        "rope_theta": st.floats(2, 1e15),
        "max_context": st.integers(1, 1 << 24),
        "rope_interleaved": st.booleans(),
        "sliding_window": st.integers(0, 1 << 24),
        "window_layers": st.none() | st.sampled_from([[], [0], [0, 1]]),
        "qk_norm_eps": st.none() | st.floats(0, 0.9),
        "logit_softcap": st.just(0.0) | st.floats(1e-6, 1e6),
        "eos_ids": st.lists(st.integers(0, 299), max_size=3),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["onnx.json", "gguf.json"]), MODELS, REPORTS)
def test_manifests_come_back_as_they_were_written(
    name: str, model: dict[str, object], report: dict[str, object]
) -> None:
    path = SEEDS / "manifest" / name
    plain = msgspec.json.decode(path.read_bytes())
    plain["model"] |= model
    (engine,) = plain["reports"]
    plain["reports"] = {engine: report}
    manifest = msgspec.convert(plain, Manifest)
    data = encode_manifest(manifest)
    assert parse_manifest(data, path) == manifest
    assert encode_manifest(parse_manifest(data, path)) == data


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """Any edit that there can be."""
    layers = tuple(sorted(draw(INDICES)))
    made_for = draw(st.text("0123456789abcdef", min_size=64, max_size=64))
    if draw(st.booleans()):
        change = Replacement(
            source=draw(NAMES), target=draw(NAMES), pad=draw(st.none() | st.just(3))
        )
        scope = draw(st.sampled_from(SCOPES))
        return Edit(made_for=made_for, layers=layers, change=change, scope=scope)
    rows = st.tuples(*[st.binary(max_size=9)] * len(layers))
    new = draw(st.dictionaries(st.integers(0, 2**31 - 1), rows, min_size=1, max_size=4))
    return Edit(made_for=made_for, layers=layers, change=NewRows(rows=new), scope="everywhere")


@settings(max_examples=60, deadline=None)
@given(edits())
def test_edits_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, edit: Edit
) -> None:
    path = tmp_path_factory.mktemp("edits") / "x.edit"
    path.write_bytes(encode_edit(edit))
    assert read_edit(path) == edit
