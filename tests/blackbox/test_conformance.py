"""Logits compared with those that the public trainers computed for their own checkpoints.

tests/data/conformance: random weights, and the trainer's logits for two sequences of each, from an
empty context, in float32. Written by the public STEM trainer: `full` and `third` consolidated,
`full` and `half` with tables in column shards (12 of `half`). Written by BlaGPT's:
`blagpt-third` (biases, norms of q and k, tied head) and `blagpt-full` (none of these). Written by
`tests/helpers/packed_folders.py`, with transformers' logits: `gemma4-mobile` (matrices of 2, 4 and 8 bits, ranges,
rows of 2 bits with a scale for each layer).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance import CASES, CONFORMANCE, reference
from installed import bundle_for, export_ggml
from tiers import slow_but
from whole_model import forward

import stem_edge
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.graph.formats import EngineName
from stem_edge.numerics.distributions import divergence
from stem_edge.runtime.backends.onnxruntime.providers import graphs


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Patch = pytest.MonkeyPatch
TOLERANCE = 1e-4
MOST_NATS = 1e-3  # where a rounding tips over; 2.7e-4 on an emulated Cortex-A76, 4e-13 on others
# How they are stored is read by the reference, too.
STORED_ALIKE = pytest.mark.parametrize(
    "case", slow_but(["third/consolidated", "blagpt-third"], CASES), indirect=True
)


@pytest.fixture(scope="module")
def bundle(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 bundle for each engine (installed.bundle_for)."""
    out = tmp_path_factory.mktemp("conformance") / "bundle"
    stem_edge.export_bundle(CONFORMANCE / case, out, type="fp32", rows="fp32")
    export_ggml(CONFORMANCE / case, out, rows="fp32")
    return out


def test_reference_model_computes_the_trainers_logits(case: str) -> None:
    checkpoint = read_checkpoint(CONFORMANCE / case)
    for ids, expected in zip(*reference(case), strict=True):
        found = forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, ids)
        assert np.abs(found - expected).max() < TOLERANCE


@STORED_ALIKE
@pytest.mark.parametrize("unblocked", [False, True])
def test_bundles_compute_the_trainers_logits(
    case: str, bundle: Path, engine: EngineName, unblocked: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Also with the attention of bundles that have a graph for prompts, which float32 bundles lack."""
    monkeypatch.setattr(graphs, "unblocked_attention", lambda *_: unblocked)
    with stem_edge.load(bundle_for(bundle, engine), engine=engine, cache_dir=tmp_path) as model:
        for ids, expected in zip(*reference(case), strict=True):
            assert np.abs(model.logits(ids) - expected).max() < TOLERANCE
            (chunk,) = model.generate(ids, max_new_tokens=1)
            assert chunk.token_ids == [int(expected[-1].argmax())]


def test_codes_of_2_4_and_8_bits_give_transformers_logits_on_any_processor(tmp_path: Path) -> None:
    case = "gemma4-mobile"
    stem_edge.export_bundle(CONFORMANCE / case, tmp_path / "bundle")
    with stem_edge.load(tmp_path / "bundle") as model:
        for ids, expected in zip(*reference(case), strict=True):
            mean = divergence(expected, model.logits(ids)).mean()
            assert mean < MOST_NATS
