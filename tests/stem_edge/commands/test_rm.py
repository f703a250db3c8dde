"""`stem-edge rm`: a model, and what the user's cache folder has for it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest
from contract import command_refused
from installed import DEMO

from stem_edge.bundle.hub.kept import MADE
from stem_edge.commands.main import main
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    RECORD,
    PreparedRecord,
    marks,
)

Capture = pytest.CaptureFixture[str]
KEY = "0123456789abcdef" * 2


def key(label: str) -> str:
    """Return a name of an entry, as stem-edge gives them."""
    return hashlib.md5(label.encode()).hexdigest()


def prepare(folder: Path, bundle: Path) -> None:
    """Put a prepared backbone of a bundle into a folder."""
    folder.mkdir(parents=True)
    (folder / "embed.onnx").write_bytes(bytes(1000))
    record = PreparedRecord(
        bundle=str(bundle),
        files={"embed.onnx": (*marks(folder / "embed.onnx"), "")},
        weights=str(bundle),
    )
    (folder / RECORD).write_bytes(msgspec.json.encode(record))


FOREIGN = (
    *("prepared/thesis/text", "checked/list.json", "made/website/manifest.json"),
    *(f"prepared/{key('other')}/notes", "counts/birds.npy"),
)


def test_removing_a_model_with_what_was_prepared_for_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    root = tmp_path / "stem-edge"
    for made, name in ((KEY[:12], "mine"), ("f" * 12, "other")):
        bundle = root / MADE / made / name
        shutil.copytree(DEMO, bundle)
        prepare(root / "prepared" / key(name), bundle)
        (root / "checked").mkdir(exist_ok=True)
        (root / "checked" / key(name)).write_text(str(bundle))
    shutil.copytree(DEMO, tmp_path / "mine")  # a folder of the user, which stays
    prepare(root / "prepared" / key("own"), tmp_path / "mine")
    assert main(["rm", str(tmp_path / "mine")]) == 0 and (tmp_path / "mine").is_dir()
    for name in FOREIGN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(root / MADE / KEY[:12] / "mine"))
    for entry in (f"tokenizers/{KEY}-{KEY}", f"graphs/{KEY}"):
        (root / entry).parent.mkdir()
        (root / entry).touch()
    (root / "prepared" / key("link")).symlink_to(root / "prepared" / key("mine"))
    for name in ("", ".", "..", "thesis", "birds.npy", key("mine"), "prepared"):
        command_refused(capsys, ["rm", name], "list")
    assert main(["rm", "mine"]) == 0
    left = {
        *(f"prepared/{key('other')}", f"prepared/{key('link')}", "prepared/thesis"),
        *(f"checked/{key('other')}", "checked/list.json", "counts/birds.npy"),
        *("made/website", f"made/{'f' * 12}"),
    }
    assert {f"{p.parent.name}/{p.name}" for p in root.glob("*/*") if p.suffix != ".lock"} == left
    assert all((root / name).is_file() for name in FOREIGN)
