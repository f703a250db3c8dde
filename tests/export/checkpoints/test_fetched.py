"""Checkpoints on a hub: which files are fetched, and that they are read from the hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import Blob, HubServer, Model, cache_of

import stem_edge
from stem_edge.errors import BundleError, CheckpointError, HubError
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.checkpoints.readers import read_checkpoint

NAME = "acme/checkpoint"
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
INDEX = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
PICTURES = {
    "README.md",
    "images/a.png",
    "onnx/model.onnx",
    "pytorch_model.bin",
    "original/params.json",
}


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (
            {"config.json", "model.safetensors", "consolidated.safetensors", "params.json"},
            {"config.json", "model.safetensors"},
        ),
        (
            {"config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors",
             "other.safetensors"},
            {"config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"},
        ),
        (
            {"params.json", "consolidated.pth", "consolidated_stem.pth", "train_state_00000.json"},
            {"params.json", "consolidated.pth", "consolidated_stem.pth"},
        ),
        (
            {"params.json", "consolidated.pth", "stem_shards/stem_model_mp0.pt", "stem_shards/notes.txt"},
            {"params.json", "consolidated.pth", "stem_shards/stem_model_mp0.pt"},
        ),
        (
            {"best_model_9.pt", "state_step000100.pt", "state_step000020.pt"},
            {"state_step000100.pt"},
        ),
    ],
)  # fmt: skip
def test_only_what_is_read_is_fetched(hub: HubServer, there: set[str], expected: set[str]) -> None:
    contents = {"model.safetensors.index.json": INDEX}
    files = {file: Blob(contents.get(file, b"data")) for file in there | TOKENIZER | PICTURES}
    hub.models[NAME] = Model()
    commit = hub.models[NAME].commit(files)
    folder = checkpoint_folder(f"hf:{NAME}", progress=False)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == expected | TOKENIZER
    hub.requests.clear()
    assert checkpoint_folder(f"hf:{NAME}@{commit}") == folder
    assert not hub.asked("/resolve/")


@pytest.mark.parametrize(
    ("files", "error", "part"),
    [
        ({"manifest.json"}, CheckpointError, "is a bundle"),
        ({"pytorch_model.bin", "readme"}, CheckpointError, "found pytorch_model.bin, readme"),
        (
            {"config.json", "model.safetensors.index.json"},
            HubError,
            "has no file model-1.safetensors",
        ),
    ],
)
def test_other_models_are_refused(
    hub: HubServer, files: set[str], error: type[Exception], part: str
) -> None:
    hub.models[NAME] = Model()
    hub.models[NAME].commit({file: Blob(INDEX) for file in files})
    with pytest.raises(error, match=part):
        read_checkpoint(f"hf:{NAME}")


def test_a_checkpoint_is_exported_by_its_name(
    hub: HubServer, tiny_checkpoint: Path, tiny_bundle: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    commit = hub.add(NAME, tiny_checkpoint)
    found = stem_edge.export_bundle(
        f"hf:{NAME}", tmp_path / "out", type="fp32", rows="int8", progress=False
    )
    assert found.manifest == stem_edge.open_bundle(tiny_bundle).manifest
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert read_checkpoint(f"hf:{NAME}").path == cache_of(NAME) / "snapshots" / commit


def test_wrong_weights_are_refused(hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.add(NAME, tiny_checkpoint)
    name = next(
        path.relative_to(tiny_checkpoint).as_posix()
        for path in sorted(tiny_checkpoint.rglob("*"))
        if path.is_file() and path.suffix in (".pt", ".pth")
    )
    data = (tiny_checkpoint / name).read_bytes()
    hub.faults.wrong[name] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(BundleError, match=f"{name}: sha256"):
        read_checkpoint(f"hf:{NAME}")


GGUFS = {"a.gguf", "q8/b.gguf", "config.json"}


@pytest.mark.parametrize(
    ("file", "fetched"),
    [
        ("a.gguf", {"a.gguf"}),
        ("q8/b.gguf", {"q8/b.gguf"}),
    ],
)
def test_a_gguf_file_is_fetched_by_its_name(
    hub: HubServer, file: str, fetched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[NAME] = Model()
    commit = hub.models[NAME].commit({name: Blob(b"data") for name in GGUFS | PICTURES})
    path = checkpoint_folder(f"hf:{NAME}:{file}", progress=False)
    folder = cache_of(NAME) / "snapshots" / commit
    assert path == folder / file
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == fetched
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert checkpoint_folder(f"hf:{NAME}@{commit}:{file}") == path
    with pytest.raises(HubError):
        checkpoint_folder(f"hf:{NAME}:other.gguf")
