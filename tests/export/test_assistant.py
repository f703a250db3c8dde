"""Assistants in bundles: their types, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma_pairs import CLUSTERS, Pair, make_pair
from hf_folders import edit
from safetensors.torch import load_file, save_file
from tiers import slow_but

import stem_edge
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import BundleError, CheckpointError, ExportError

EXACT: dict[str, Any] = {"type": "fp32", "rows": "fp32"}
DATA = "assistant.data"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def folder(pair: Pair) -> Path:
    """The pair's folders t and a."""
    return pair.folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    """The pair without any quantization."""
    stem_edge.export_bundle(folder / "t", folder / "b", assistant=folder / "a", **EXACT)
    return folder / "b"


@pytest.mark.parametrize(
    ("options", "types"),
    slow_but(
        [({}, ("int8", "int8"))],
        [
            ({}, ("int8", "int8")),
            ({"type": "int4"}, ("int4", "int8")),
            ({"type": "fp32"}, ("fp32", "fp32")),
        ],
    ),
)
def test_it_has_the_types_that_are_given(
    folder: Path, tmp_path: Path, options: dict[str, Any], types: tuple[str, str]
) -> None:
    """Eight bits where the backbone's types are measured; what leads to and from the model is small."""
    made = stem_edge.export_bundle(folder / "t", tmp_path / "b", assistant=folder / "a", **options)
    found = made.manifest.assistant
    assert found is not None
    assert (found.format.weights, found.format.type_of("assistant")) == types
    stem_edge.load(made.path, threads=1, speculate=True).close()  # which lets it draft


def changed(folder: Path, **tensors: Any) -> None:
    """Write tensors of a folder anew; None: leave out."""
    file = folder / "model.safetensors"
    found = load_file(file) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({n: t for n, t in found.items() if t is not None}, file)


def repeated(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")["masked_embedding.token_ordering"]
    found[0] = found[1]
    changed(folder, masked_embedding__token_ordering=found)


def of_text(**options: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        edit(folder, "config.json", text_config=text | options)

    return change


def of_all(**options: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, "config.json", **options)


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "another size": (
        lambda folder: changed(folder, pre_projection__weight=torch.zeros(16, 128)),
        CheckpointError,
        r"pre_projection.weight is \[16, 128\]; expected \[16, 64\], as config",
    ),
    "another kind": (of_all(model_type="gemma4_text"), CheckpointError, "expected .*assistant"),
    "ids twice": (repeated, CheckpointError, "does not name each of 320 tokens once"),
    "clusters": (of_all(num_centroids=7), CheckpointError, r"centroids.* is \[16, 16\]; expected \[7"),
    "too many": (
        of_all(centroid_intermediate_top_k=CLUSTERS + 1),
        ExportError,
        "scores 17 of these",
    ),
    "other windows": (of_text(sliding_window=9), ExportError, "kinds that the model does not have"),
    "rows": (of_text(hidden_size_per_layer_input=8), CheckpointError, "hidden_size_per_layer_input"),
    "no tensor": (
        lambda folder: changed(folder, pre_projection__weight=None),
        CheckpointError,
        "no tensor pre_projection.weight",
    ),
    "more tensors": (
        lambda folder: changed(folder, other=load_file(folder / "model.safetensors")["model.norm.weight"]),
        CheckpointError,
        "other is not part of an assistant",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_assistant_of_a_model_is_refused(
    folder: Path, tmp_path: Path, case: str
) -> None:
    change, error, words = REFUSED[case]
    shutil.copytree(folder / "a", tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(error, match=words):
        stem_edge.export_bundle(folder / "t", tmp_path / "b", assistant=tmp_path / "a", **EXACT)
    assert not (tmp_path / "b").exists()


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another vocabulary": (lambda a: a["model"].update(vocab_size=304), "has 304 tokens"),
    "no clusters of one size": (lambda a: a.update(clusters=15), "320 tokens in 15 clusters"),
    "more than all": (lambda a: a.update(best=17), "scores 17"),
    "none": (lambda a: a.update(best=0), "scores 0"),
    "other windows": (lambda a: a["model"].update(sliding_window=8), "kinds that the model"),
    "a wider one": (lambda a: a["model"].update(d_ff=64), f"{DATA}: .* bytes, but the weights"),
}


@pytest.mark.parametrize("case", FORGED)
def test_manifests_that_describe_another_are_refused(
    bundle: Path, tmp_path: Path, case: str
) -> None:
    change, words = FORGED[case]
    shutil.copytree(bundle, tmp_path / "b")
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest["assistant"])
    (tmp_path / "b" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=words):
        stem_edge.load(tmp_path / "b", speculate=True)
