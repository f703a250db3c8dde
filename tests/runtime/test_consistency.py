"""`verify --runs`: every way of running a bundle gives the same tokens, and a way that does not is
named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main
from stem_edge.runtime import consistency as runs
from stem_edge.runtime.backends.onnxruntime.prepared.looking import LEAST_NBYTES
from stem_edge.runtime.consistency import verify_runs

WAYS = {
    "plain",
    "overlapped",
    "fewest slots",
    "64 slots, overlapped",
    "mmap",
    "mmap, overlapped",
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
    assert set(results.values()) == {"ok"}


def test_a_dense_model(dense_bundle: Path) -> None:
    manifest = stem_edge.open_bundle(dense_bundle).manifest
    assert manifest.tables is None
    assert manifest.report.worst_logit_difference < 1e-4
    assert verify_runs(dense_bundle) == {"plain": "ok", "overlapped": "ok"}
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

    def run(path: Path, prompt: str, new: int, options: dict[str, Any], *rest: Any) -> list[int]:
        tokens = real(path, prompt, new, options, *rest)
        return [7, *tokens[1:]] if options.get("slots") == 4 else tokens

    monkeypatch.setattr(runs, "_run", run)
    assert main(["verify", str(DEMO), "--runs"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith("fewest slots  "))
    assert line.endswith("other tokens from new token 1 on")
    assert "2 of 18 ways of running it give other tokens" in err
    assert main(["verify", str(DEMO), "--runs", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
