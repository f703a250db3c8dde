"""`verify --runs`: every way of running a bundle gives the same tokens, and a way that does not is
named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from guessing import CHEAP
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import consistency as runs
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.backends.onnxruntime.loader import OrtLoader
from stem_edge.runtime.backends.onnxruntime.prepared.looking import LEAST_NBYTES
from stem_edge.runtime.backends.ways import EngineWays
from stem_edge.runtime.consistency import Asked, verify_runs
from stem_edge.runtime.engine import Context, Engine
from stem_edge.runtime.generation import Chunk

ANSWERS = ["smaller chunks", "kept prefixes", "prefixes kept in files"]
WAYS = {
    *ANSWERS,
    "plain",
    "overlapped",
    "fewest slots",
    "64 slots, overlapped",
    "warm start",
    "emulated SD card, overlapped",
    "resident",
}


@pytest.mark.slow
def test_all_ways_with_both_graphs() -> None:
    seen: list[str] = []
    results = verify_runs(DEMO, max_new_tokens=24, progress=seen.append)
    assert set(results) == WAYS | {f"{name}, prefill graph" for name in WAYS}
    assert set(results.values()) == {"ok"}
    assert seen == list(results)


@pytest.mark.slow
def test_a_prepared_backbone_is_one_of_them(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "bundle", prefill_graph=True)
    assert LEAST_NBYTES > 0
    monkeypatch.setattr("stem_edge.runtime.backends.onnxruntime.prepared.looking.LEAST_NBYTES", 0)
    results = verify_runs(tmp_path / "bundle", max_new_tokens=8)
    assert results["prepared"] == results["prepared, prefill graph"] == "ok"
    rounded = {way for way, result in results.items() if result != "ok"}
    assert {way.partition(",")[0] for way in rounded} <= {"batches"}  # their exact ones are run
    assert results["exact batches"] == "ok" or not rounded


@pytest.fixture(scope="module")
def prepared(dense_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with the prepared backbone of the dense bundle."""
    folder = tmp_path_factory.mktemp("cache")
    assert main(["prepare", str(dense_bundle), "--cache-dir", str(folder), "--threads", "1"]) == 0
    return folder


@pytest.mark.parametrize("same", [True, False])
def test_answers_to_pieces_of_a_text(
    same: bool, dense_bundle: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = StepCosts(seconds=0.01, times={2: 1.0}, same_bits=same, same_in_batches=same)
    monkeypatch.setattr(OrtLoader, "step_costs", costs)
    asked = Asked("one two three " * 50, prompts=3, prompt_tokens=20, new_tokens=6)
    results = verify_runs(dense_bundle, cache_dir=prepared, asked=asked)
    batches = ["batches"] if same else ["batches", "exact batches"]
    assert list(results) == ["plain", "smaller chunks", "guesses", *batches, *ANSWERS[1:]]
    unlike = {name for name, result in results.items() if result != "ok"}
    assert unlike == (set() if same else {"guesses", "batches"})


@pytest.mark.parametrize(("tokens", "is_run"), [(50, True), (64, True), (70, False)])
def test_chunks_that_end_in_steps_for_other_kernels(
    tokens: int, is_run: bool, dense_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineWays, "tile", 64)
    asked = Asked("one two three " * 200, prompts=2, prompt_tokens=tokens, new_tokens=2)
    found = verify_runs(dense_bundle, asked=asked)["smaller chunks"]
    told = "not run: steps of fewer than 64 tokens round otherwise; give --text, and --prompt-tokens 128"
    assert found == ("ok" if is_run else told)


def test_guesses_that_change_answers_are_found(
    dense_bundle: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrtLoader, "step_costs", CHEAP)
    real = Engine.step

    def step(engine: Engine, context: Context, ids: Any, *args: Any, **more: Any) -> F32:
        """Give a step of several tokens the logits of their neighbours in the vocabulary."""
        logits = real(engine, context, ids, *args, **more)
        return np.roll(logits, more.get("apart", False) and len(ids) > 1, axis=1)

    monkeypatch.setattr(Engine, "step", step)
    asked = Asked("one two three " * 50, prompts=3, prompt_tokens=20, new_tokens=16)
    found = verify_runs(dense_bundle, cache_dir=prepared, asked=asked)["guesses"]
    assert found.startswith("3 of 3 answers differ, the first of prompt 1: other tokens from new ")


def test_a_text_without_so_many_pieces(dense_bundle: Path) -> None:
    asked = Asked("one two", prompts=100, prompt_tokens=20, new_tokens=2)
    with pytest.raises(InputError, match=r"a text of \d+ tokens has no 100 pieces of \d+; give"):
        verify_runs(dense_bundle, asked=asked)


def test_a_sequence_that_fails_is_no_other_answer() -> None:
    model, failed = Mock(), Chunk("", [], None, "error", BackendError("broken"))
    model.generate_many.return_value = [(0, failed)]
    with pytest.raises(BackendError, match="broken"):
        runs._in_batches(model, [[1]], [[2]])


@pytest.mark.parametrize("option", ["--prompts", "--prompt-tokens", "--new-tokens"])
def test_counts_without_a_text_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for runs_too in ([], ["--runs"]):
        assert main(["verify", str(DEMO), option, "5", *runs_too]) == 1
        assert "--new-tokens are for --text; give it, or leave them out" in capsys.readouterr().err


def test_a_dense_model(dense_bundle: Path) -> None:
    manifest = stem_edge.open_bundle(dense_bundle).manifest
    assert manifest.tables is None
    assert manifest.report.worst_logit_difference < 1e-4
    assert verify_runs(dense_bundle) == dict.fromkeys(["plain", "overlapped", *ANSWERS], "ok")
    with stem_edge.load(dense_bundle) as model:
        assert model.plan.slots == 0
        list(model.generate([1, 2, 3], max_new_tokens=3))
        assert (model.stats.row_hits, model.stats.flash_bytes) == (0, 0)
    assert main(["inspect", str(dense_bundle)]) == 0
    assert main(["inspect", str(dense_bundle), "--json"]) == 0


@pytest.mark.slow
def test_a_way_that_gives_other_tokens_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = runs._run

    def run(path: Path, asked: Asked, options: dict[str, Any]) -> list[list[int]]:
        (tokens,) = real(path, asked, options)
        return [[7, *tokens[1:]] if options.get("slots") == 4 else tokens]

    monkeypatch.setattr(runs, "_run", run)
    assert main(["verify", str(DEMO), "--runs"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith("fewest slots  "))
    assert line.endswith("other tokens from new token 1 on")
    assert "2 of 24 ways of running it give other tokens" in err
    assert main(["verify", str(DEMO), "--runs", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
