"""Hostile edit files: their contents, other things in their place, and their names.

No lines of the catalogue; the contract is the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract import refused

import stem_edge
from stem_edge.bundle.edit_files.file import open_edit, read_edit
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import EditError
from stem_edge.files import disk

MADE_FOR = "0123456789abcdef" * 4
CONTENT: dict[str, Any] = {
    "format_version": 2,
    "made_for": MADE_FOR,
    "source": "Spain",
    "target": "Germany",
    "layers": [1, 2],
}


def made(**changes: Any) -> bytes:
    return json.dumps(CONTENT | changes).encode()


def not_read(folder: Path, data: bytes, *naming: str) -> None:
    path = folder / "an.edit"
    path.write_bytes(data)
    refused(lambda: read_edit(path), EditError, path, *naming, kept=[folder])


NO_EDIT = "not an edit of format 2"


def without(name: str) -> bytes:
    return json.dumps({n: v for n, v in CONTENT.items() if n != name}).encode()


OTHER_TYPES: list[Any] = [None, True, 3, -0.5, "text", [], {}, [[]], {"a": 1}]
# Names of cases, what the files hold, and what the message says.
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", NO_EDIT), "zeros": (bytes(100), NO_EDIT), "null": (b"null", NO_EDIT),
    "a list": (b"[]", NO_EDIT), "no fields": (b"{}", NO_EDIT), "a text": (b'"edit"', NO_EDIT),
    "UTF-16": (b"\xff\xfe{}", NO_EDIT), "a zip file": (b"PK\x03\x04", NO_EDIT),
    "no UTF-8": (made().replace(b"Spain", b"Sp\xffin"), NO_EDIT),
    "an older version": (b'{"format_version": 1, "sha256": "x", "edit": {}}', "make it again"),
    "a newer version": (made(format_version=3, sha1024="x"), "upgrade stem-edge"),
    "no version": (without("format_version"), "required field `format_version`"),
    "no tables": (without("made_for"), "required field `made_for`"),
    "no source": (without("source"), "required field `source`"),
    "no target": (without("target"), "required field `target`"),
    "no layers": (without("layers"), "required field `layers`"),
    "an unknown field": (made(run="rm"), NO_EDIT),
    "an unknown scheme": (made(scheme="best"), NO_EDIT),
    "an empty list of layers": (made(layers=[]), "layers () are not ascending"),
    "a layer twice": (made(layers=[1, 1]), NO_EDIT),
    "layers that descend": (made(layers=[*range(9, -1, -1)]), "layers (9, 8, 7, 6, 5, 4, 3, 2, 1, 0) are not"),
    "a long version": (b'{"format_version": ' + b"9" * 100_000 + b"}", NO_EDIT),
}  # fmt: skip
for opening, closing in ((b"[", b"]"), (b'{"edit":', b"}"), (b'[{"a":[', b"]}]")):
    kind, deep = opening.decode(), opening * 40 + b"1" + closing * 40
    REFUSED |= {
        f"40 {kind}": (deep, NO_EDIT),
        f"40 {kind} in the edit": (made().replace(b"[1, 2]", deep), NO_EDIT),
        f"100,000 {kind}": (opening * 100_000, NO_EDIT),
        f"endless {kind} in the edit": (made()[:90] + opening * 100_000, NO_EDIT),
    }
for text in ("a\nb\x1b[31m", "x" * 100_000, "\u202e\u2028"):
    REFUSED[f"a message with {text[:5]!r}"] = made(**{text: 1}), NO_EDIT
for field in ("made_for", "scheme", "layers", "scope"):
    for value in OTHER_TYPES:
        REFUSED[f"{field} is {value}"] = made(**{field: value}), NO_EDIT
for number in (
    "1e400",
    "NaN",
    "9223372036854775808",
    "-1",
    "0.5",
    "01",
    "1" * 5000,
):
    said = number.encode()
    REFUSED |= {
        f"version {number[:9]}": (made().replace(b'n": 2', b'n": ' + said), NO_EDIT),
        f"layer {number[:9]}": (made().replace(b"[1, 2]", b"[" + said + b"]"), NO_EDIT),
        f"pad {number[:9]}": (made().replace(b'"so', b'"pad": ' + said + b', "so'), NO_EDIT),
    }


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    not_read(tmp_path, data, message)


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "an.edit"
    path.touch()
    os.truncate(path, 1 << 40)
    refused(lambda: read_edit(path), EditError, "larger than", seconds=5)


def test_pipes_folders_and_links_in_circles_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "folder.edit").mkdir()
    (tmp_path / "circle.edit").symlink_to("circle.edit")
    (tmp_path / "null.edit").symlink_to(os.devnull)
    names = ["folder", "circle", "null", "nowhere"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.edit")
        names.append("pipe")
    for name in names:
        path = tmp_path / f"{name}.edit"
        refused(partial(read_edit, path), EditError, path, seconds=5)


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    (tmp_path / "an.edit").write_bytes(made())
    monkeypatch.setattr(disk, "pread", fail)
    refused(lambda: read_edit(tmp_path / "an.edit"), EditError, "Input/output error")


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)  # 300 tokens, STEM layers 1 and 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; edits outside of it must not be found by name."""
    (tmp_path / "secret.edit").write_bytes(made())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"


NAMES = ["", ".", "..", "\0", "a\0b", "secret", "x" * 300, "x" * 5000, "a\nb", "C:secret", "*", "~"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_is_looked_for_nowhere_else(here: Path, name: str, bundle: Bundle) -> None:
    with pytest.raises(EditError):
        open_edit(bundle, name)


def test_a_hostile_edit_leaves_a_loaded_model_as_it_was(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "an.edit"
    with stem_edge.load(bundle.path, cache_dir=tmp_path) as model:
        before = model.generate_text([1, 2, 3], max_new_tokens=4)
        for data in (made(), made(layers=[1]), b"[" * 10**5, b""):
            path.write_bytes(data)
            with pytest.raises(EditError), model.edited(path):
                pass
        assert model.generate_text([1, 2, 3], max_new_tokens=4) == before
