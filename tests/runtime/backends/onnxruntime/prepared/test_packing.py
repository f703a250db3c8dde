"""Matrices packed a few at a time have the forms that onnxruntime gives them in the whole graph."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import onnx
import pytest
from formats import usual_format
from hf_folders import write_gemma
from installed import DATA

from stem_edge.bundle.opening import Bundle
from stem_edge.export.exporter import export_with
from stem_edge.export.job.recipe import Recipe
from stem_edge.graph.ir import Graph
from stem_edge.graph.names import EMBED
from stem_edge.runtime.backends.onnxruntime.prepared import packing
from stem_edge.runtime.backends.onnxruntime.prepared.mapped_pages import packed_places
from stem_edge.runtime.backends.onnxruntime.prepared.packing import Packer
from stem_edge.runtime.backends.onnxruntime.providers import session
from stem_edge.runtime.backends.onnxruntime.providers.graphs import graph_source
from stem_edge.runtime.backends.onnxruntime.providers.joined import joined_parts
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session

GEMMA_3N, GEMMA_4, NO_VNNI = "Gemma 3n", "Gemma 4", "products saturate"
INT4 = {"type": usual_format("int4", head="int8", block_size=64), "prefill_graph": True}
slow = pytest.mark.slow
only_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="only x86 saturates"
)
CASES: list[Any] = [
    pytest.param("", INT4, id="int4"),
    pytest.param(NO_VNNI, INT4, marks=only_x86, id="int4-without-vnni"),
    pytest.param("", {"type": "fp32"}, id="fp32"),
    pytest.param("", {"type": "int8"}, marks=slow, id="int8"),
    pytest.param(GEMMA_3N, {"type": "fp32"}, marks=slow, id="streams"),
    pytest.param(GEMMA_4, {"type": "int8", "prefill_graph": True}, marks=slow, id="tied"),
]


def export(name: str, checkpoint: Path, folder: Path, options: dict[str, Any]) -> Bundle:
    if name == GEMMA_3N:
        checkpoint = DATA / "conformance" / "gemma3n-text"
    if name == GEMMA_4:
        checkpoint = folder / "checkpoint"
        write_gemma(checkpoint, 8)
    return export_with(checkpoint, folder / "bundle", Recipe(**options))


@pytest.fixture
def small(tiny_checkpoint: Path, tmp_path: Path) -> Bundle:
    return export("", tiny_checkpoint, tmp_path, {"type": "int4", "prefill_graph": True})


def parts(bundle: Bundle) -> dict[str, Graph]:
    """Return the graphs that are packed."""
    graphs = joined_parts(bundle, prefill=bundle.manifest.has_prefill)
    return {name: graph for name, graph in graphs.items() if name != EMBED}


def matrices(graph: Path) -> dict[str, tuple[bytes, str, list[bytes]]]:
    """Return plain bytes, key and packed bytes of each packed matrix."""
    found = {}
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if "prepacked_0" in entries:
            data = (graph.parent / entries["location"]).read_bytes()
            plain = data[int(entries["offset"]) :][: int(entries["length"])]
            key, *places = entries["prepacked_0"].split("|")
            numbers = [tuple(map(int, place.split(";"))) for place in places]
            found[tensor.name.removesuffix("_s8_2_u8")] = (
                plain,
                key,
                [data[at : at + n] for at, n, _ in numbers],
            )
    return found


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_forms_of_the_whole_graph(
    name: str,
    options: dict[str, Any],
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == NO_VNNI:
        monkeypatch.setattr(session, "products_saturate", lambda: True)
        monkeypatch.setattr(packing, "products_saturate", lambda: True)
    monkeypatch.setattr(packing, "GROUP_NBYTES", 10_000)  # several groups of several matrices
    bundle = export(name, tiny_checkpoint, tmp_path, options)
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    alone.mkdir()
    whole.mkdir()
    packer = Packer(bundle, alone, 1)
    for part, graph in parts(bundle).items():
        packer.pack(part, graph)
        open_session(graph_source(bundle, part, graph), 1, save_to=whole / part)
        found = matrices(alone / part)
        assert found and found == matrices(whole / part)


def test_plain_matrices_lie_apart_and_graphs_share_weights(small: Bundle, tmp_path: Path) -> None:
    packer, graphs = (
        Packer(small, tmp_path, 1),
        parts(small),
    )
    for name, graph in graphs.items():
        packer.pack(name, graph)
    assert {path.name for path in tmp_path.glob("*.data")} == {"step.data", "prefill.data"}
    places = [place for place, _ in packed_places(tmp_path / "step")]
    assert not any(place % packing.PACKED_ALIGNMENT for place in places)  # else they are copied
    first = min(places)
    for tensor in onnx.load(tmp_path / "step", load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if "prepacked_0" in entries:
            assert int(entries["offset"]) + int(entries["length"]) <= first
