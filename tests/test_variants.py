"""Graphs for devices compute what the graphs that they are derived from compute, and share weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import onnx
import pytest
from conftest import DATA, DEMO
from device_runs import exact_graphs, logits, run
from make_checkpoint import Shape, write_checkpoint
from test_architectures import SIZES, VARIANTS, write
from test_conformance import CASES, reference

import stem_edge
from stem_edge.bundle import BACKBONE_DATA, Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.device_io import slab_name
from stem_edge.errors import BundleError, ExportError
from stem_edge.export import device_graphs, linear
from stem_edge.export.variant_files import NOTE, add_variants, plan_variants
from stem_edge.export.variants import obstacle
from stem_edge.formats import BackboneFormat
from stem_edge.graph import names as io
from stem_edge.graph.device_rows import Activations, DeviceRows
from stem_edge.graph.names import VARIANTS as ALL
from stem_edge.onnx_check import check_graphs
from stem_edge.rows import RecordLayout

ODD = {"dim": 96, "d_ff": 96}  # three blocks of 32
# name of an architecture, what differs in it, how it is exported
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("stem", {}, {"backbone": "fp32", "tables": "fp32"}),
    ("stem", ODD, {"backbone": "int4", "tables": "int4"}),
    ("stem-gate", {}, {"backbone": "int8", "tables": "fp16"}),
    ("stem", {"vocab_size": 600, "dim": 64, "d_ff": 96}, {"backbone": "int4", "tables": "int4"}),
    ("low rank, plus", {"dim": 64}, {"tables": "fp16", "asymmetric": True, "block_size": 32}),
    ("low rank", ODD, {"backbone": "int4", "tables": "fp32"}),
    ("dense", {}, {"backbone": "int8"}),
    ("tied head", ODD, {"backbone": "fp32", "tables": "int8"}),
    ("all at once", {"row_rank": 32}, {"backbone": "fp32", "tables": "int8"}),
    ("all at once", {"row_rank": 32}, {"backbone": "int8", "tables": "int4", "group_size": 16}),
    ("q and k norm, halves", {}, {"backbone": "fp32", "tables": "fp32"}),
    ("soft cap and head bias", ODD, {"backbone": "int4", "head": "int8", "tables": "int8"}),
    ("biases", {}, {"backbone": "int8", "tables": "fp16"}),
    ("window", ODD, {"backbone": "int8", "tables": "int8"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_variants_give_the_logits_of_the_plain_graphs(number: int, tmp_path: Path) -> None:
    name, sizes, options = MODELS[number]
    config = ModelConfig(**(SIZES | VARIANTS[name] | sizes))
    checkpoint, ids, _ = write(tmp_path / "checkpoint", config, number)
    out = tmp_path / "out"
    bundle = stem_edge.export_bundle(checkpoint, out, prefill_graph=False, **options)
    format = bundle.manifest.backbone
    assert format is not None and format.variants[:2] == ("fp32", "fp16")
    check_graphs(bundle)
    plain = logits(bundle, exact_graphs(bundle, tmp_path / "exact"), ids)
    assert np.abs(logits(bundle, out, ids, "fp32") - plain).max() < 1e-5
    lost = np.abs(logits(bundle, out, ids, "fp16") - plain).max() / np.abs(plain).max()
    assert lost < 1e-2  # weights and activations have 11 bits each


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_variants_give_the_trainers_logits(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bundle = stem_edge.export_bundle(
        DATA / "conformance" / case, out, backbone="fp32", tables="fp32", variants=["fp32", "fp16"]
    )
    for ids, expected in zip(*reference(case), strict=True):
        assert np.abs(logits(bundle, out, ids, "fp32") - expected).max() < 1e-3
        assert np.abs(logits(bundle, out, ids, "fp16") - expected).max() < 2e-2


def test_places_whose_logits_are_wanted(tmp_path: Path) -> None:
    """Any of them, in any order."""
    bundle = open_bundle(DEMO)
    hidden = np.random.default_rng(0).standard_normal((1, 5, bundle.manifest.model.dim))
    both: list[tuple[Activations, Any]] = [("fp32", np.float32), ("fp16", np.float16)]
    for variant, floats in both:
        path = DEMO / io.graph_file(io.HEAD, variant)
        feeds = {io.HIDDEN: hidden.astype(floats), io.WANTED: np.arange(5)}
        every = run(path, feeds)[io.LOGITS]
        some = run(path, feeds | {io.WANTED: np.array([3, 0])})[io.LOGITS]
        assert (every.dtype, some.shape) == (np.float32, (1, 2, bundle.manifest.model.vocab_size))
        assert np.array_equal(some, every[:, [3, 0]])


def test_the_greatest_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 3, 1756)).astype(np.float32)
    feeds = {io.LOGITS: logits, io.COUNT: np.array([7])}
    for variant in get_args(Activations):
        found = run(DEMO / io.graph_file(io.TOP, variant), feeds)
        order = np.argsort(-logits, axis=-1)[..., :7]
        assert np.array_equal(found[io.TOP_IDS], order)
        assert np.array_equal(found[io.TOP_LOGITS], np.take_along_axis(logits, order, -1))


def test_rows_of_many_layers_are_cut_some_at_a_time(tmp_path: Path) -> None:
    """Lists of sizes lie in the graph, where there is little room."""
    layers = tuple(range(device_graphs.MOST_PARTS + 3))
    layout = RecordLayout(records=9, layers=layers, parts=((64,),), row_type="int8", group_size=32)
    rows = DeviceRows(layout, "fp16")
    model = device_graphs.rows_graph(rows)
    path = tmp_path / "rows.onnx"
    path.write_bytes(model.SerializeToString())
    records = np.random.default_rng(0).integers(0, 256, (2, layout.record_nbytes), np.uint8)
    packed = rows.pack(records)
    feeds: dict[str, Any] = {io.RECORDS: packed, io.SLOTS: np.array([[3], [1]])}
    feeds |= {slab_name(slab): np.zeros((4, slab.words), np.int32) for slab in rows.slabs}
    made = run(path, feeds)
    found = np.concatenate([made[io.NEW + slab_name(slab)] for slab in rows.slabs], axis=1)
    assert np.array_equal(found[[3, 1]], packed)
    assert not found[[0, 2]].any()
    assert [len(node.output) for node in model.graph.node if node.op_type == "Split"] == [65, 65, 6]


# Which there are


def test_variants_are_small_and_share_the_weights() -> None:
    files = open_bundle(DEMO).manifest.files
    small = [n for n in files if n.startswith(("device.", "portable."))]
    assert sum(files[n].nbytes for n in small) < 0.05 * open_bundle(DEMO).manifest.nbytes
    for name in small:
        model = onnx.load_model(str(DEMO / name), load_external_data=False)
        entries = [entry for t in model.graph.initializer for entry in t.external_data]
        assert {e.value for e in entries if e.key == "location"} <= {BACKBONE_DATA}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(vocab_size=258, n_layers=2, d_ff=32, stem_layers=(1,))
    return write_checkpoint(tmp_path_factory.mktemp("variants") / "checkpoint", shape)


def export(checkpoint: Path, out: Path, **options: Any) -> Bundle:
    default: dict[str, Any] = {"backbone": "fp32", "tables": "int8", "progress": False}
    return stem_edge.export_bundle(checkpoint, out, **(default | options))


def variants_of(bundle: Bundle) -> tuple[str, ...]:
    assert bundle.manifest.backbone is not None
    graphs = {variant for _, variant in bundle.manifest.all_graphs() if variant}
    assert graphs == set(bundle.manifest.backbone.variants)
    return bundle.manifest.backbone.variants


def contents(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_variants_can_be_chosen(checkpoint: Path, tmp_path: Path) -> None:
    usual = export(checkpoint, tmp_path / "usual")
    assert variants_of(usual) == ALL
    one = export(checkpoint, tmp_path / "one", variants=["fp16"])
    assert variants_of(one) == ("fp16",)
    none = export(checkpoint, tmp_path / "none", variants=())
    assert variants_of(none) == ()
    assert not [n for n in none.manifest.files if n.startswith(("device.", "portable."))]
    with pytest.raises(
        ExportError, match="a variant is 'fp8'; expected one of fp32, fp16, portable"
    ):
        export(checkpoint, tmp_path / "x", variants=["fp8"])
    with pytest.raises(ExportError, match="variants: for the engine onnx, and this is gguf"):
        export(checkpoint, tmp_path / "x", engine="gguf", backbone="f32", variants=["fp16"])


def test_variants_are_added_to_a_bundle_as_an_export_writes_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("usual", "again"):
        export(checkpoint, tmp_path / name)
    export(checkpoint, tmp_path / "without", variants=())
    usual = contents(tmp_path / "usual")
    assert contents(tmp_path / "again") == usual
    assert variants_of(add_variants(tmp_path / "without")) == ALL
    assert contents(tmp_path / "without") == usual
    less = add_variants(tmp_path / "without", ["portable", "fp16"])
    assert variants_of(less) == ("fp16", "portable")
    assert set(stem_edge.verify(tmp_path / "without").values()) == {"ok"}
    assert contents(tmp_path / "without").keys() < usual.keys()


def test_an_added_backbone_replaces_variants(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(checkpoint, out)
    added = stem_edge.export_bundle(
        checkpoint, out, backbone="int8", variants=["fp32"], add=True, progress=False
    )
    assert variants_of(added) == ("fp32",)
    assert not [n for n in contents(out) if n.startswith(("device.fp16", "portable"))]
    check_graphs(added)


def test_models_that_can_have_none(checkpoint: Path, tmp_path: Path) -> None:
    config = ModelConfig(**(SIZES | VARIANTS["hash-moe"]))
    experts, *_ = write(tmp_path / "experts", config)
    bundle = stem_edge.export_bundle(experts, tmp_path / "out", backbone="fp32", tables="int8")
    assert variants_of(bundle) == ()
    notes = bundle.manifest.report.notes
    assert any(n.startswith(NOTE) and "experts of" in n for n in notes)
    check_graphs(bundle)
    with pytest.raises(ExportError, match=r"variant fp16: experts of .* --variants none"):
        stem_edge.export_bundle(experts, tmp_path / "x", tables="int8", variants=["fp16"])
    assert not (tmp_path / "x").exists()
    with pytest.raises(ExportError, match="variant fp32: experts of"):
        add_variants(tmp_path / "out", ["fp32"])
    kept = add_variants(tmp_path / "out").manifest.report.notes
    assert kept == notes


@pytest.mark.parametrize(
    ("dim", "change", "said"),
    [
        (96, {}, ""),
        (96, {"asymmetric": True}, "3 blocks of 32"),
        (96, {"asymmetric": True, "head": "int8"}, ""),
        (96, {"asymmetric": True, "head": "fp32"}, ""),
        (48, {}, "3 blocks of 16"),
        (64, {"block_size": 32, "asymmetric": True}, ""),
    ],
)
def test_embeddings_of_an_odd_number_of_blocks(dim: int, change: dict[str, Any], said: str) -> None:
    config = ModelConfig(**(SIZES | {"dim": dim, "stem_layers": ()}))
    format = BackboneFormat(weights="int4", head="int4", block_size=128)
    format = msgspec.structs.replace(format, **change)
    found = obstacle(config, None, format)
    assert said in found and bool(said) == bool(found)
    assert ("fp16" in plan_variants(config, None, format, None).variants) == (not said)


def test_rows_that_do_not_fit_say_so() -> None:
    layout = RecordLayout(records=3, layers=(1,), parts=((80,),), row_type="int8", group_size=16)
    config = ModelConfig(**(SIZES | {"stem_layers": (1,)}))
    format = BackboneFormat(weights="fp32", head="fp32", block_size=128)
    plan = plan_variants(config, layout, format, None)
    assert plan.variants == ("portable",)
    assert plan.notes == (
        f"{NOTE}(fp32, fp16): rows of ((80,),) in groups of 16 cannot lie on a device",
    )


def test_a_bundle_without_graphs_gets_none(tiny_gguf: Path) -> None:
    with pytest.raises(ExportError, match="has no backbone for onnxruntime"):
        add_variants(tiny_gguf)


def test_a_head_in_pieces(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SPLIT_VALUES", 100 * 32)
    bundle = export(checkpoint, tmp_path / "out", backbone="int4", prefill_graph=False)
    check_graphs(bundle)
    plain = logits(bundle, exact_graphs(bundle, tmp_path / "exact"), [5, 9, 11])
    assert np.abs(logits(bundle, tmp_path / "out", [5, 9, 11], "fp32") - plain).max() < 1e-5


def test_what_is_no_bundle_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BundleError):
            add_variants(path)
    assert not list(tmp_path.iterdir())
