"""Quantized rows and matrices, on each engine: logits of the reference that computes with what a bundle stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from formats import export_as, format_with
from installed import needs_ggml
from models import DEVICE, GGML, ORT
from oracle import NumpyReference
from ways import many

import stem_edge
from stem_edge.export.job.table_plan import ExportRows
from stem_edge.graph.formats import BackboneFormat
from stem_edge.numerics.distributions import divergence

FOUR, EIGHT = (format_with(bits, asymmetric=True) for bits in ("int4", "int8"))
ROWS: list[tuple[str, str, ExportRows]] = [
    ("hash-moe", ORT, "int4"), ("mixture", ORT, "int8"), ("mixture", GGML, "fp16"), ("gate", DEVICE, "fp16"),
    ("gate", DEVICE, "int4"), ("gate", GGML, "int4"), ("stem", ORT, "fp16"), ("windows", ORT, "int4"),
    ("windows", DEVICE, "int8"), ("stem", GGML, "int8"), ("engram", ORT, "int8"),
    ("ngrams", ORT, "int4"), ("gemma4", ORT, "int8"),
]  # fmt: skip
MATRICES: list[tuple[str, BackboneFormat]] = [
    ("stem-plus", FOUR),  # whose matrix of embedding and head is stored once
    ("windows", EIGHT),
    ("windows", format_with("int4", bits={"down": 8, "wo": 32})),
    ("windows", format_with("int8", bits={"v": 4})),
    ("gemma3", FOUR),
    ("gemma4", format_with("int8")),
]


def reference(name: str, bundle: Any, shared: Path) -> NumpyReference:
    """Return the reference of a bundle, whose logits are not the checkpoint's."""
    found, ids = NumpyReference(models.checkpoint_of(name, shared)), models.prompts(name)[0]
    exact = found.logits(ids)
    found.use(bundle)
    assert np.abs(found.logits(ids) - exact).max() > models.KINDS[name].tolerance
    return found


@pytest.mark.parametrize(
    ("name", "engine", "rows"),
    [pytest.param(*one, marks=needs_ggml if one[1] == GGML else ()) for one in ROWS],
)
def test_rows(name: str, engine: str, rows: ExportRows, shared: Path, tmp_path: Path) -> None:
    options: Any = models.EXACT[GGML if engine == GGML else ORT] | {"rows": rows, "max_kl": 9.0}
    path = models.checkpoint_of(name, shared)
    bundle = stem_edge.export_bundle(path, tmp_path / "bundle", **options)
    check(name, engine, bundle, reference(name, bundle, shared))


@pytest.mark.parametrize(("name", "format"), MATRICES)
def test_matrices_on_a_device(
    name: str, format: BackboneFormat, shared: Path, tmp_path: Path
) -> None:
    """A device's operators round no activations."""
    path = models.checkpoint_of(name, shared)
    bundle = export_as(path, tmp_path / "bundle", format, max_kl=9.0)
    expected = reference(name, bundle, shared)
    check(name, DEVICE, bundle, expected)
    ids = models.prompts(name)[0]
    with stem_edge.load(bundle.path, threads=1) as model:  # rounds those of each block to int8
        assert divergence(expected.logits(ids), model.logits(ids)).mean() < 0.3


def check(name: str, engine: str, bundle: Any, expected: NumpyReference) -> None:
    """Compare logits of texts, and of the next token of each after a step with the others."""
    device: Any = {"device_memory": "4GB"} if engine == DEVICE else {"engine": engine}
    with stem_edge.load(bundle.path, threads=1, sequences=3, **device) as model:
        texts, tolerance = models.prompts(name), models.KINDS[name].tolerance
        for ids in texts:
            found, logits = model.logits(ids), expected.logits(ids)
            assert np.abs(found - logits).max() < tolerance
        for number, answer in many(model, texts, max_new_tokens=3, logprobs=1).items():
            logits = expected.logits([*texts[number], *answer.ids])[len(texts[number]) - 1 : -1]
            peak = logits.max(axis=1)
            total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
            chosen = logits[np.arange(len(answer.ids)), answer.ids]
            assert np.abs(chosen - total - answer.logprobs).max() < 2 * tolerance
