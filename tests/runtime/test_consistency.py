"""`verify --runs`: every way of running a bundle gives the same tokens, and a way that does not is
named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guessing import CHEAP
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import consistency as runs
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.backends.onnxruntime.loader import OrtLoader
from stem_edge.runtime.consistency import verify_runs
from stem_edge.runtime.engine import Context, Engine

WAYS = ["kept prompts", "sequences together", "drafts", "prompts kept in files"]


@pytest.mark.slow
def test_all_ways() -> None:
    seen: list[str] = []
    results = verify_runs(DEMO, max_new_tokens=24, progress=seen.append)
    assert list(results) == seen == WAYS
    assert results.pop("drafts").startswith("not run")
    assert set(results.values()) == {"ok"}


@pytest.mark.parametrize("same", [True, False])
def test_drafts_where_steps_of_several_tokens_round_alike(
    same: bool, dense_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = StepCosts(seconds=0.01, times={2: 1.0}, same_bits=same, same_in_batches=same)
    monkeypatch.setattr(OrtLoader, "step_costs", costs)
    results = verify_runs(dense_bundle, max_new_tokens=6)
    assert [*results] == WAYS
    assert results["drafts"] == (
        "ok" if same else "not run: steps of several tokens round differently"
    )


def test_drafts_that_change_answers_are_found(
    dense_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrtLoader, "step_costs", CHEAP)
    real = Engine.step

    def step(engine: Engine, context: Context, ids: Any, *args: Any, **more: Any) -> F32:
        """Give a step of several tokens the logits of their neighbours in the vocabulary."""
        logits = real(engine, context, ids, *args, **more)
        return np.roll(logits, more.get("apart", False) and len(ids) > 1, axis=1)

    monkeypatch.setattr(Engine, "step", step)
    found = verify_runs(dense_bundle, max_new_tokens=16)["drafts"]
    assert found.startswith("other tokens of prompt 1 from new token ")


def test_a_dense_model(dense_bundle: Path) -> None:
    manifest = stem_edge.open_bundle(dense_bundle).manifest
    assert manifest.tables is None
    assert manifest.report.worst_logit_difference < 1e-4
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
    real = runs._in_batches
    monkeypatch.setattr(
        runs, "_in_batches", lambda *given: [[7, *tokens[1:]] for tokens in real(*given)]
    )
    assert main(["verify", str(DEMO), "--runs"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith("sequences together  "))
    assert line.endswith("of prompt 3 from new token 1 on")
    assert "1 of 3 ways of running it give other tokens" in err
    assert main(["verify", str(DEMO), "--runs", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
