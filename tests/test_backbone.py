"""The emitted graph: pinned versions, only operators that have a kernel, heads of any width."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from make_checkpoint import Shape, write_checkpoint
from onnxruntime.capi import _pybind_state

import stem_edge
from stem_edge.export.heads import pad_heads
from stem_edge.export.lingua import read_checkpoint
from stem_edge.reference import whole


@pytest.fixture(scope="module")
def int4_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int4") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, prefill_graph=True)
    return out


GRAPHS = ["backbone.embed", "backbone.early", "backbone.late", "backbone.head", "prefill"]


@pytest.mark.parametrize("graph", GRAPHS)
def test_versions_are_pinned_and_every_operator_has_a_cpu_kernel(
    int4_bundle: Path, graph: str
) -> None:
    model = onnx.load(int4_bundle / f"{graph}.onnx", load_external_data=False)
    assert model.ir_version == 10
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 21), ("com.microsoft", 1)}
    kernels = {
        (kernel.domain, kernel.op_name)
        for kernel in _pybind_state.get_all_opkernel_def()
        if kernel.provider == "CPUExecutionProvider"
    }
    missing = {(node.domain, node.op_type) for node in model.graph.node} - kernels
    # QuickGelu is a function that onnxruntime inlines into kernels it has.
    assert missing <= {("com.microsoft", "QuickGelu")}


@pytest.mark.parametrize("graph", GRAPHS)
def test_external_data_stays_in_the_bundle(int4_bundle: Path, graph: str) -> None:
    model = onnx.load(int4_bundle / f"{graph}.onnx", load_external_data=False)
    data = f"{graph.split('.')[0]}.onnx.data"
    size = (int4_bundle / data).stat().st_size
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert entries["location"] == data
            assert int(entries["offset"]) + int(entries["length"]) <= size


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("dim", [16, 48, 80])
def test_heads_of_any_width(tmp_path: Path, heads: tuple[int, int], dim: int) -> None:
    shape = Shape(dim=dim, n_heads=heads[0], n_kv_heads=heads[1])
    path = write_checkpoint(tmp_path / "checkpoint", shape)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", backbone="fp32", tables="fp32")
    assert bundle.manifest.report.worst_logit_difference < 1e-4


def test_heads_that_fit_are_left_alone(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(dim=64))
    checkpoint = read_checkpoint(path)
    matrices = {name: checkpoint.backbone[f"layers.0.{name}"] for name in ("wq", "wk", "wv", "wo")}
    assert pad_heads(checkpoint.config, matrices) is matrices
    assert np.isfinite(whole(matrices["wo"])).all()
