"""Graphs for devices compute the same as the graphs from which they are derived."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from architectures import SIZES, VARIANTS, write
from device_runs import exact_graphs, logits, run
from installed import DEMO
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.export.exporter import export_with
from stem_edge.export.job.options import ExportOptions
from stem_edge.graph import linear
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.device import variants
from stem_edge.graph.device.rows import Activations
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.onnxruntime.device.loader import variant_graphs
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of
from stem_edge.tables.rows import RecordLayout

ODD = {"dim": 96, "d_ff": 96}  # three blocks of 32
OFFSETS = BackboneFormat(
    weights="int4", head="int8", block_size=32, tied=True, offsets=True, kv_peaks=True
)
# name of an architecture, what differs in it, how it is exported
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("stem", {}, {"backbone": "fp32", "tables": "fp32"}),
    ("stem", ODD, {"backbone": "int4", "tables": "int4"}),
    ("stem-gate", {}, {"backbone": "int8", "tables": "fp16"}),
    ("stem-mix", {}, {"backbone": "int8", "tables": "fp16"}),
    ("stem", {"vocab_size": 600, "dim": 64, "d_ff": 96}, {"backbone": "int4", "tables": "int4"}),
    ("low rank, plus", {"dim": 64}, {"tables": "fp16", "asymmetric": True, "block_size": 32}),
    ("low rank", ODD, {"backbone": "int4", "tables": "fp32", "asymmetric": False}),
    ("dense", {}, {"backbone": "int8"}),
    ("tied head", ODD, {"backbone": "fp32", "tables": "int8"}),
    ("all at once", {"row_rank": 32}, {"backbone": "fp32", "tables": "int8"}),
    ("all at once", {"row_rank": 32}, {"backbone": "int8", "tables": "int4", "group_size": 16}),
    ("tied head", ODD, {"stored": OFFSETS}),
    ("q and k norm, halves", {}, {"backbone": "fp32", "tables": "fp32"}),
    ("soft cap and head bias", ODD, {"backbone": "int4", "head": "int8", "tables": "int8"}),
    ("biases", {}, {"backbone": "int8", "tables": "fp16"}),
    ("window", ODD, {"backbone": "int8", "tables": "int8"}),
]


def variant_logits(bundle: Bundle, ids: list[int], variant: Activations) -> np.ndarray:
    return logits(bundle, variant_graphs(bundle, variant), ids, variant)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_variants_give_the_logits_of_the_plain_graphs(number: int, tmp_path: Path) -> None:
    name, sizes, options = MODELS[number]
    config = ModelConfig(**(SIZES | VARIANTS[name] | sizes))
    checkpoint, ids, _ = write(tmp_path / "checkpoint", config, number)
    bundle = export_with(
        checkpoint, tmp_path / "out", ExportOptions(prefill_graph=False, **options)
    )
    plain = logits(bundle, exact_graphs(bundle), ids)
    assert np.abs(variant_logits(bundle, ids, "fp32") - plain).max() < 1e-5
    lost = np.abs(variant_logits(bundle, ids, "fp16") - plain).max() / np.abs(plain).max()
    assert lost < 1e-2  # weights and activations have 11 bits each


def test_places_whose_logits_are_wanted() -> None:
    """Any of them, in any order."""
    bundle = open_bundle(DEMO)
    hidden = np.random.default_rng(0).standard_normal((1, 5, bundle.manifest.model.dim))
    both: list[tuple[Activations, Any]] = [("fp32", np.float32), ("fp16", np.float16)]
    for variant, floats in both:
        graph = variant_graphs(bundle, variant)[io.HEAD]
        feeds = {io.HIDDEN: hidden.astype(floats), io.WANTED: np.arange(5)}
        every = run(graph, feeds)[io.LOGITS]
        some = run(graph, feeds | {io.WANTED: np.array([3, 0])})[io.LOGITS]
        assert (every.dtype, some.shape) == (np.float32, (1, 2, bundle.manifest.model.vocab_size))
        assert np.array_equal(some, every[:, [3, 0]])


def test_the_greatest_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 3, 1756)).astype(np.float32)
    feeds = {io.LOGITS: logits, io.COUNT: np.array([7])}
    found = run(variant_graphs(open_bundle(DEMO), "fp32")[io.TOP], feeds)
    order = np.argsort(-logits, axis=-1)[..., :7]
    assert np.array_equal(found[io.TOP_IDS], order)
    assert np.array_equal(found[io.TOP_LOGITS], np.take_along_axis(logits, order, -1))


def places(graphs: dict[str, Graph]) -> set[tuple[str, str, int, int]]:
    """Name, file, offset and size of every weight that graphs read."""
    tensors = [tensor for graph in graphs.values() for tensor in graph.tensors.values()]
    return {(t.name, t.file, t.offset, t.nbytes) for t in tensors if t.data is None}


@pytest.mark.parametrize("variant", get_args(io.Variant))
def test_weights_stay_where_they_are(variant: io.Variant) -> None:
    manifest = (bundle := open_bundle(DEMO)).manifest
    described = manifest.model, manifest.tables, format_of(bundle)
    made = places(variants.graphs(variant, *described))
    assert made <= places(decoding(*described).graphs)
    assert len(made) > 50


def test_a_head_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SPLIT_VALUES", 100 * 32)
    shape = Shape(vocab_size=258, n_layers=2, d_ff=32, stem_layers=(1,))
    checkpoint = write_checkpoint(tmp_path / "checkpoint", shape)
    bundle = stem_edge.export_bundle(
        checkpoint, tmp_path / "out", backbone="int4", asymmetric=False, prefill_graph=False
    )
    plain = logits(bundle, exact_graphs(bundle), [5, 9, 11])
    assert np.abs(variant_logits(bundle, [5, 9, 11], "fp32") - plain).max() < 1e-5


@pytest.mark.parametrize(
    ("dim", "change", "said"),
    [
        (96, {}, ""),
        (96, {"asymmetric": True}, ""),
        (96, {"asymmetric": True, "head": "int8"}, ""),
        (96, {"asymmetric": True, "head": "fp32"}, ""),
        (48, {}, "3 blocks of 16"),
        (48, {"asymmetric": True}, "3 blocks of 16"),
        (64, {"block_size": 32, "asymmetric": True}, ""),
    ],
)
def test_embeddings_of_an_odd_number_of_blocks(dim: int, change: dict[str, Any], said: str) -> None:
    config = ModelConfig(**(SIZES | {"dim": dim, "stem_layers": ()}))
    format = BackboneFormat(weights="int4", head="int4", block_size=128)
    format = msgspec.structs.replace(format, **change)
    found = variants.obstacle("fp16", config, None, format)
    assert said in found and bool(said) == bool(found)


def test_rows_that_do_not_fit_say_so() -> None:
    layout = RecordLayout(records=3, layers=(1,), parts=((80,),), row_type="int8", group_size=16)
    config = ModelConfig(**(SIZES | {"stem_layers": (1,)}))
    format = BackboneFormat(weights="fp32", head="fp32", block_size=128)
    said = "rows of ((80,),) in groups of 16 have no device layout"
    expected = {"fp32": said, "fp16": said, "portable": ""}
    found = {name: variants.obstacle(name, config, layout, format) for name in io.VARIANTS}
    assert found == expected
    experts = ModelConfig(**(SIZES | VARIANTS["hash-moe"]))
    layout = msgspec.structs.replace(layout, parts=((32,), (32,)))
    for name in io.VARIANTS:
        assert "experts" in variants.obstacle(name, experts, layout, format)
