"""Where the graph for prompts takes prompts, and what says so if it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.runtime.backends.onnxruntime import loader

PROMPT = "a prompt of more than eight tokens"


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "quantized"
    stem_edge.export_bundle(tiny_checkpoint, out, type="int4", prefill_graph=True)
    return out


def test_where_all_matrices_do_not_fit_together(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts go through the graphs that decode; plan, figures and command say so."""
    found = footprint_of(open_bundle(quantized).manifest)
    both = found.step_nbytes + found.prefill_nbytes
    logits = []
    for limit in (both, both - 1):
        monkeypatch.setattr(loader, "memory_limit", lambda limit=limit: limit)
        with stem_edge.load(quantized) as model:
            assert model.plan.prefill == (limit == both)
            logits.append(model.logits(model.tokenize(PROMPT)))
    assert not np.array_equal(logits[0], logits[1])
    assert main(["fit", str(quantized)]) == 0
    assert "its matrices would take" in " ".join(capsys.readouterr().out.split())
