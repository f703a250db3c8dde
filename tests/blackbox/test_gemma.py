"""Gemma 4 from its checkpoint to its logits.

Its layers are of several kinds, and all of them take rows. The last ones borrow K and V, and run
for the wanted positions only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import CONFORMANCE
from exact_models import GEMMA, GEMMAS, Exact, off, published
from formats import export_as, format_with, usual_format
from hf_folders import write_flat
from installed import bundle_for, needs_ggml
from loading import load_fixed
from prompt_graph import without_prompt_graph
from tiers import slow_but

import stem_edge
from stem_edge.apps.measuring.analysis import cost_figures
from stem_edge.commands.bundles.bundle_report import bundle_table
from stem_edge.errors import BundleError, ExportError, FarError, InputError
from stem_edge.ggml import gguf_schema
from stem_edge.graph import names as io
from stem_edge.graph.formats import BACKBONE_GRAPH, MatrixKind, WeightType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.loaded import padded_ropes
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session

CHECKPOINT = CONFORMANCE / GEMMA


@pytest.fixture(scope="module", params=GEMMAS[:2])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    return published(tmp_path_factory.mktemp("gemma"), request.param)


@pytest.fixture
def bundle(exact: Exact) -> Path:
    return exact.path


def test_the_graph_for_other_tools_gives_the_same_logits(exact: Exact) -> None:
    """Layers that borrow K and V read what the lender made, although no memory is shared."""
    ids, opened = exact.ids, stem_edge.open_bundle(exact.path)
    session = open_session(opened.file(BACKBONE_GRAPH), 1)
    sizes: Any = {"T": len(ids), "capacity": len(ids), "context": len(ids)}
    types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
    feeds: dict[str, Any] = {
        one.name: np.zeros([sizes.get(size, size) for size in one.shape], types[one.type])
        for one in session.get_inputs()
    }
    feeds |= padded_ropes(opened.manifest.model, len(ids))
    feeds[io.TOKEN_IDS][0], feeds[io.SEQLENS_K][0] = ids, len(ids) - 1
    feeds[io.TOTAL_LENGTH][...] = len(ids)
    with stem_edge.open_tables(exact.path) as tables:
        feeds |= {f"row.{layer}": tables[np.array(ids), layer][None] for layer in tables.layers}
    (found,) = session.run([io.LOGITS], feeds)
    assert off(found[0], exact.expected) < exact.tolerance


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], F32]:
    """A checkpoint with scores so flat that rounding changes little; ids [T] and logits [T, V]."""
    path = tmp_path_factory.mktemp("flat") / "checkpoint"
    return path, *write_flat(path, "gemma4")


@pytest.mark.parametrize("kind", slow_but(["int8"], ["int8", "int4"]))
def test_quantized_graphs_are_near_the_model(
    kind: WeightType, flat: tuple[Path, list[int], F32], tmp_path: Path
) -> None:
    """Compare decoding and prompts."""
    path, ids, expected = flat
    options: dict[str, Any] = {"rows": "int8", "prefill_graph": True}
    export_as(path, tmp_path / "bundle", usual_format(kind), **options)
    # Low for prompts, because a scale per token and column is coarse in such a small model.
    least = {
        ("int8", False): 0.999,
        ("int4", False): 0.9,
        ("int8", True): 0.9,
        ("int4", True): 0.9,
    }
    without_prompt_graph(tmp_path / "bundle", tmp_path / "one graph")
    for prefill, name in ((True, "bundle"), (False, "one graph")):
        with load_fixed(tmp_path / name) as loaded:
            found = loaded.logits(ids)
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least[kind, prefill]


@pytest.mark.slow
def test_an_export_that_ruins_the_model_is_refused(tmp_path: Path) -> None:
    """4 bits everywhere, in a model of sharp scores, leave other text."""
    text, out = tmp_path / "ids.npy", tmp_path / "out"
    np.save(text, np.random.default_rng(0).integers(307, size=64))
    four: dict[MatrixKind, int] = {"ple_context": 4, "ple_gate": 4, "ple_out": 4}
    format = format_with(bits=four, block_size=64, asymmetric=True)
    asked: dict[str, Any] = {"rows": "int4", "calibration": text}
    with pytest.raises(FarError, match=r"divergence from .* is [.0-9]+ nats .* allows 0.1"):
        export_as(CHECKPOINT, out, format, max_kl=0.1, **asked)
    with pytest.raises(FarError, match=r"at most 0.5 is the same model; take more bits"):
        export_as(CHECKPOINT, out, format, **asked)
    assert not out.exists()
    made = export_as(CHECKPOINT, out, format, max_kl=9.0, **asked)
    assert made.manifest.report.divergence > 0.5


@needs_ggml
@pytest.mark.parametrize(
    ("weights", "tables", "least"),
    [
        pytest.param("f16", "fp16", 0.9999, marks=pytest.mark.slow),
        pytest.param("q8_0", "int8", 0.999, marks=pytest.mark.slow),
        pytest.param("q4_0", "int4", 0.9, marks=pytest.mark.slow),
        ("q4_k_m", "int8", 0.9),
    ],
)
def test_ggmls_types_are_near_the_model(
    weights: Any, tables: Any, least: float, flat: tuple[Path, list[int], F32], tmp_path: Path
) -> None:
    path, ids, expected = flat
    out = stem_edge.export_bundle(
        path, tmp_path / "bundle", engine="ggml", type=weights, rows=tables
    )
    with load_fixed(out.path) as loaded:
        found = loaded.logits(ids)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least


@needs_ggml
def test_parts_that_ggml_lacks_are_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(gguf_schema.NAMES, "layer_scale")
    with pytest.raises(ExportError, match="has layer_scale, which run on onnxruntime only"):
        stem_edge.export_bundle(CHECKPOINT, tmp_path / "out", engine="ggml")
    with pytest.raises(
        BundleError, match=r"backbone\.gguf with layer_scale, which only onnxruntime"
    ):
        stem_edge.open_bundle(bundle_for(bundle, "ggml"))


def test_reports_of_a_bundle(bundle: Path) -> None:
    table = " ".join(bundle_table(stem_edge.open_bundle(bundle)).split())
    assert "16 or 32 wide" in table
    with pytest.raises(InputError, match="costs are counted for STEM layers"):
        cost_figures(stem_edge.open_bundle(bundle), None)
