"""`stem-edge list --all` and `stem-edge rm`: entries of the user's cache folder."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import onnxruntime as ort
import pytest
from contract import command_refused
from installed import DEMO

from stem_edge.commands.bundles.entries import OURS, entries
from stem_edge.commands.main import main
from stem_edge.hub.kept import MADE
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    FORMAT,
    RECORD,
    PreparedRecord,
    marks,
)
from stem_edge.runtime.text.kept import readers
from stem_edge.system.processor import cpu_digest

Capture = pytest.CaptureFixture[str]
KEY = "0123456789abcdef" * 2


def key(label: str) -> str:
    """Return a name of an entry, as stem-edge gives them."""
    return hashlib.md5(label.encode()).hexdigest()


def prepare(root: Path, name: str, **changes: object) -> None:
    """Put a prepared backbone of an existing bundle into the folder."""
    shutil.copytree(DEMO, root / "bundle", dirs_exist_ok=True)
    folder = root / "prepared" / name
    folder.mkdir(parents=True)
    (folder / "embed.onnx").write_bytes(bytes(1000))
    record = PreparedRecord(
        format=FORMAT,
        bundle=str(root / "bundle"),
        onnxruntime=ort.__version__,
        cpu=cpu_digest(),
        files={"embed.onnx": marks(folder / "embed.onnx")},
        weights=str(root / "bundle"),
    )
    record = msgspec.structs.replace(record, **changes)
    (folder / RECORD).write_bytes(msgspec.json.encode(record))


LEFT = f".making-{KEY}"
NAMES = {
    *(KEY, key("cut"), LEFT, f"{KEY}.npy", f"{readers()}-{key('tokenizers')}"),
    *(f"{KEY}-{key('tokenizers')}", f"{key('ggml')}.json", key("checked")),
    *(f"{KEY}-{KEY}.safetensors", f".{KEY[:16]}.tmp"),
}
FOREIGN = (
    *("prepared/thesis/text", "trials/patients.csv", "places/map.geojson"),
    *("tokenizers/my-tokenizer.json", "counts/birds.npy", "ggml/notes.json"),
    *("checked/list.json", "made/website/manifest.json", "prefixes/model.safetensors"),
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    root = tmp_path / "stem-edge"
    prepare(root, KEY)
    prepare(root, key("cut"), files={"g.onnx": 1001})
    prepare(root, LEFT)
    files = {
        "counts": [f"{KEY}.npy"],
        "tokenizers": [f"{readers()}-{key('tokenizers')}", f"{KEY}-{key('tokenizers')}"],
        "ggml": [f"{key('ggml')}.json"],
        "checked": [key("checked")],
        "prefixes": [f"{KEY}-{KEY}.safetensors", f".{KEY[:16]}.tmp"],
    }
    assert {*files, "prepared", MADE} == OURS.keys()
    for kind, names in files.items():
        (root / kind).mkdir()
        for name in names:
            (root / kind / name).touch()
    for name in FOREIGN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    (root / "counts" / f"{key('dangling')}.npy").symlink_to(tmp_path / "gone")
    (root / "prepared" / key("link")).symlink_to(root / "prepared" / "thesis")
    return root


def test_removing_what_is_listed_and_nothing_else(root: Path, capsys: Capture) -> None:
    for name in (
        "",
        ".",
        "..",
        "thesis",
        "birds.npy",
        key("link"),
        f"{key('dangling')}.npy",
        "prepared",
    ):
        command_refused(capsys, ["rm", name], "list --all")
    assert len(list(entries(root))) == len(NAMES)
    assert main(["rm", *NAMES]) == 0
    assert list(entries(root)) == [] and (root / "bundle").is_dir()
    assert all((root / name).read_text() == "mine" for name in FOREIGN)
    assert (root / "prepared" / key("link") / "text").is_file()
