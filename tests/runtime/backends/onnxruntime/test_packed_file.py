"""The order of weights in a prepared graph: nothing is lost, and packed matrices come first."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.runtime.backends.onnxruntime.packed_file import put_packed_first, share_weights
from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session


@pytest.fixture
def saved(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A graph as onnxruntime saves it."""
    bundle = stem_edge.export_bundle(tiny_checkpoint, tmp_path / "bundle", prefill_graph=True)
    graph = cpu_graphs(bundle, prefill=False)["late"]
    open_session(graph, 1, [CPU], save_to=tmp_path / "late.onnx")
    return tmp_path / "late.onnx"


def weights(graph: Path) -> tuple[dict[str, bytes], dict[str, bytes], list[tuple[int, bool]]]:
    """Return plain and packed bytes by tensor, and each place in order, True for plain ones."""
    data = graph.with_name(f"{graph.name}.data").read_bytes()
    plain, packed, places = dict[str, bytes](), dict[str, bytes](), list[tuple[int, bool]]()
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        texts = [text for key, text in entries.items() if "prepacked" in key]
        blobs = [blob for text in texts for blob in text.split("|")[1:]]
        if entries:
            start = int(entries["offset"])
            plain[tensor.name] = data[start : start + int(entries["length"])]
            places.append((start, bool(blobs)))
        for number, blob in enumerate(blobs):
            start, nbytes, _ = map(int, blob.split(";"))
            packed[f"{tensor.name} {number}"] = data[start : start + nbytes]
            places.append((start, False))
    return plain, packed, sorted(places)


def test_packed_matrices_come_first_and_nothing_changes(saved: Path) -> None:
    plain, packed, before = weights(saved)
    others = onnx.load(saved, load_external_data=False)
    put_packed_first(saved)
    found_plain, found_packed, after = weights(saved)
    assert packed and found_packed == packed and found_plain == plain
    order = [is_plain for _, is_plain in after]
    assert order == sorted(order) and [is_plain for _, is_plain in before] != order
    again = onnx.load(saved, load_external_data=False)
    for graph in (others.graph, again.graph):
        for tensor in graph.initializer:
            del tensor.external_data[:]
    assert others == again


def test_a_second_time_changes_nothing(saved: Path) -> None:
    put_packed_first(saved)
    files = [saved, saved.with_name(f"{saved.name}.data")]
    once = [file.read_bytes() for file in files]
    put_packed_first(saved)
    assert [file.read_bytes() for file in files] == once


@pytest.mark.parametrize(
    ("said", "instead"),
    [(b"|", b"/"), (b";", b","), (b"length", b"lengtH"), (b"offset", b"offsex")],
)
def test_places_in_other_words_change_nothing(saved: Path, said: bytes, instead: bytes) -> None:
    data, weight_file = saved.read_bytes(), saved.with_name(f"{saved.name}.data")
    saved.write_bytes(data.replace(said, instead))
    before = saved.read_bytes(), weight_file.read_bytes()
    with pytest.raises(ValueError):
        put_packed_first(saved)
    assert (saved.read_bytes(), weight_file.read_bytes()) == before


def test_weights_of_another_graph_are_not_shared(saved: Path) -> None:
    other = saved.with_name("head.onnx")
    open_session(
        cpu_graphs(open_bundle(saved.parent / "bundle"), prefill=False)["head"],
        1,
        [CPU],
        save_to=other,
    )
    before = other.read_bytes()
    with pytest.raises(ValueError, match="has no"):
        share_weights(other, saved)
    assert other.read_bytes() == before and other.with_name("head.onnx.data").exists()
