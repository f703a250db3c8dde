"""Decode graphs: the offsets of their weights, and other tools that read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from architectures import SIZES, VARIANTS, write
from formats import usual_format
from installed import DEMO
from tiers import slow_but

import stem_edge
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.export.backbone import weight_file
from stem_edge.export.exporter import export_with
from stem_edge.export.job.recipe import Recipe
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import BACKBONE_DATA, BACKBONE_GRAPH, PREFILL_DATA
from stem_edge.graph.ir import Graph
from stem_edge.graph.prompt_products import prompts
from stem_edge.graph.weight_plan import LARGE_ALIGNMENT, LARGE_NBYTES, SMALL_ALIGNMENT, WeightPlan
from stem_edge.runtime.backends.onnxruntime.loaded import padded_ropes

# ---------------------------------------------------------------- places

INT4 = {"type": "int4", "rows": "int8"}
WIDE = {"dim": 64, "d_ff": 96}
KINDS = usual_format("int4", kinds={"down": "int8", "wo": "fp32", "embedding": "int8"})
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("stem", {}, {"type": "fp32", "rows": "fp32"}),
    "int8, post norms": ("post norms", {}, {"type": "int8"}),
    "int4 with zero points": ("stem", WIDE, INT4 | {"type": usual_format("int4", block_size=32)}),
    "kinds": ("tied head", {}, INT4 | {"type": KINDS, "prefill_graph": True}),
    "low rank, balanced": (
        "gate",
        {"row_rank": 32},
        {"type": "int8", "prefill_graph": True, "calibration": True},
    ),
    "experts": ("hash-moe", {}, INT4 | {"prefill_graph": True}),
    "biases": ("windows", {"row_rank": 32}, INT4 | {"prefill_graph": True}),
}


def check_places(plan: WeightPlan, graphs: dict[str, Graph]) -> None:
    """Tensors lie apart, aligned, and as densely as that allows; those that are read are these.

    A matrix that is embedding and head is read under two names.
    """
    all_read = [t for graph in graphs.values() for t in graph.tensors.values() if t.file]
    assert all(tensor.file == plan.file for tensor in all_read)
    read = {(tensor.offset, tensor.nbytes): tensor for tensor in all_read}
    end = 0
    for tensor in sorted(read.values(), key=lambda tensor: tensor.offset):
        alignment = LARGE_ALIGNMENT if tensor.nbytes >= LARGE_NBYTES else SMALL_ALIGNMENT
        assert tensor.offset % alignment == 0
        assert end <= tensor.offset < end + alignment
        end = tensor.offset + tensor.nbytes
    assert end == plan.nbytes


@pytest.mark.parametrize("name", slow_but(["fp32", "kinds", "biases"], CASES))
def test_weight_files_are_as_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, sizes, options = CASES[name]
    config = ModelConfig(**(SIZES | VARIANTS[architecture] | sizes))
    checkpoint, ids, _ = write(tmp_path / "checkpoint", config)
    if "calibration" in options:
        monkeypatch.setattr(weight_file, "OUTLIER", 0.0)
        np.save(tmp_path / "ids.npy", np.array(ids))
        options = options | {"calibration": tmp_path / "ids.npy"}
    manifest = export_with(checkpoint, tmp_path / "out", Recipe(**options)).manifest
    format = manifest.backbone
    assert format is not None
    assert bool(format.balanced) == ("calibration" in options)
    made = [decoding(manifest.model, manifest.tables, format, kv="int8")]
    made += [prompts(manifest.model, manifest.tables, format)] if format.prefill else []
    assert [plan.file for _, plan in made] == [BACKBONE_DATA, PREFILL_DATA][: len(made)]
    for graphs, plan in made:
        check_places(plan, graphs)
        assert (tmp_path / "out" / plan.file).stat().st_size == plan.nbytes
    for graph in prompts(manifest.model, manifest.tables, format, kv="int4").graphs.values():
        peaks = {tensor for tensor in graph.tensors.values() if tensor.file == BACKBONE_DATA}
        assert len(peaks) == 2 * config.own_kv_layers
        assert peaks <= {t for one in made[0].graphs.values() for t in one.tensors.values()}


# ---------------------------------------------------------------- backbone.onnx

OTHER_TOOL = """
import sys
import numpy as np
import onnxruntime as ort
graph, feeds, out = sys.argv[1:]
make = ort.InferenceSession  # with none of our settings
session, feeds = make(graph), np.load(feeds)
found = session.run(["logits"], {one.name: feeds[one.name] for one in session.get_inputs()})
np.save(out, found[0][0])
assert not [name for name in sys.modules if name.startswith("stem_edge")]
"""


def inputs(bundle: Bundle, ids: list[int]) -> dict[str, Any]:
    """Make the inputs of the graphs for a first step with these tokens."""
    model, count = bundle.manifest.model, len(ids)
    feeds: dict[str, Any] = {
        io.TOKEN_IDS: np.array([ids], np.int64),
        io.SLOT_IDS: np.arange(count)[None],
        io.POSITIONS: np.arange(count)[None],
        io.WANTED: np.arange(count),
    }
    for prefix in ("", io.WINDOW):
        feeds[prefix + io.SEQLENS_K] = np.array([count - 1], np.int32)
        feeds[prefix + io.TOTAL_LENGTH] = np.array(count, np.int32)
    width, capacity = io.head_width(model.layer(0)), count + 2  # unused positions of the KV cache
    feeds |= padded_ropes(model, capacity)
    for layer in range(model.n_layers):
        shape = (1, model.n_kv_heads, capacity, width)
        feeds |= {f"{name}{layer}": np.zeros(shape, np.float32) for name in (io.KEYS, io.VALUES)}
    return feeds


def other_tool(bundle: Bundle, ids: list[int], folder: Path) -> np.ndarray:
    """Logits of backbone.onnx by plain onnxruntime, in a process that knows nothing of us."""
    feeds = inputs(bundle, ids)
    with stem_edge.open_tables(bundle.path) as tables:
        for layer in bundle.manifest.model.stem_layers:
            feeds[f"row.{layer}"] = np.stack([tables[token, layer] for token in ids])[None]
    np.savez(folder / "feeds.npz", **feeds)
    paths = [bundle.file(BACKBONE_GRAPH), folder / "feeds.npz", folder / "logits.npy"]
    command = [sys.executable, "-c", OTHER_TOOL, *map(str, paths)]
    subprocess.run(command, check=True, cwd=folder)
    return np.asarray(np.load(paths[-1]))


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_other_tools_run_the_whole_graph(name: str, tmp_path: Path, tiny_bundle: Path) -> None:
    bundle = open_bundle({"demo": DEMO, "tiny": tiny_bundle}[name])
    ids = [5, 9, 11, 5, 200, 3]  # too few for the graph for prompts
    with stem_edge.load(bundle.path, threads=1) as model:
        expected = model.logits(ids)
    assert np.abs(other_tool(bundle, ids, tmp_path) - expected).max() < 1e-4


def test_another_reader_finds_a_graph_of_these_versions(tiny_bundle: Path) -> None:
    for path in (DEMO, tiny_bundle):
        data = (path / BACKBONE_GRAPH).read_bytes()
        model = onnx.load_model_from_string(data)
        assert model.SerializeToString(deterministic=True) == data
        versions = {(one.domain, one.version) for one in model.opset_import}
        assert (model.ir_version, versions) == (10, {("", 21), ("com.microsoft", 1)})
        assert all(node.name == node.output[0] for node in model.graph.node)
