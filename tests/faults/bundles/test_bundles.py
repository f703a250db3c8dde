"""Catalogue M6 to M18: the files of a bundle. Its manifest is in test_manifest.py."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from changing import rewrite, seal
from contract import command_refused, refused
from loading import load_fixed

from stem_edge.bundle.checksums import verify
from stem_edge.bundle.manifest import MANIFEST, TABLES, TOKENIZER
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BundleError, StemEdgeError
from stem_edge.files import disk
from stem_edge.files import hashing as hashes
from stem_edge.graph.formats import BACKBONE_DATA, GGUF
from stem_edge.runtime.rows.table_arrays import open_tables

GROUP = f"{TABLES}/zarr.json"
SHARD = f"{TABLES}/records/c/0/0"
FOLDERS = [TABLES, f"{TABLES}/records", f"{TABLES}/records/c", f"{TABLES}/records/c/0"]
needs_links = pytest.mark.skipif(os.name != "posix", reason="links and pipes are made as on POSIX")


@pytest.fixture
def bundle(tiny_copy: Path) -> Path:
    """A bundle to be damaged."""
    return tiny_copy


def link(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def bound_socket(path: Path) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except OSError as error:
        pytest.skip(f"this user cannot make a device ({error.strerror})")


INSTEAD = [link, pipe, folder, bound_socket, device]


# open_tables looks for itself: a bundle may change after it was opened.
READERS: list[tuple[Callable[[Path], object], str]] = [
    (open_bundle, name) for name in (MANIFEST, TOKENIZER, BACKBONE_DATA, GROUP, SHARD)
]
READERS += [(open_tables, name) for name in (GROUP, f"{TABLES}/records/zarr.json", SHARD)]


@needs_links
@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize(("read", "name"), READERS)
def test_m6_something_else_than_a_file(
    bundle: Path, read: Callable[[Path], object], name: str, instead: Callable[[Path], None]
) -> None:
    instead(bundle / name)
    refused(lambda: read(bundle), BundleError, bundle / name, "not a regular file")


@needs_links
@pytest.mark.parametrize("name", FOLDERS)
def test_m6_a_folder_that_is_a_link(bundle: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(bundle / name, outside)
    (bundle / name).symlink_to(outside)
    said = f"{bundle / name}: not a folder (it is a link)"
    refused(lambda: open_bundle(bundle), BundleError, said, kept=[outside])
    assert verify(bundle)[SHARD].startswith(said)
    refused(lambda: open_tables(bundle), BundleError, bundle / name, "not a folder")


@needs_links
def test_m7_the_cache_of_a_hub_where_every_file_is_a_link(bundle: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    for path in [p for p in bundle.rglob("*") if p.is_file()]:
        place = snapshot / path.relative_to(bundle)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    message = refused(lambda: open_bundle(snapshot), BundleError, snapshot, kept=[bundle])
    assert "copy the bundle as plain files, cp -rL BUNDLE COPY" in message
    subprocess.run(["cp", "-rL", str(snapshot), str(tmp_path / "copy")], check=True)
    assert set(verify(open_bundle(tmp_path / "copy").path).values()) == {"ok"}


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", [TOKENIZER, BACKBONE_DATA, GROUP, SHARD])
def test_m8_another_size_than_the_manifest_says(bundle: Path, name: str, change: int) -> None:
    size = (bundle / name).stat().st_size
    os.truncate(bundle / name, size + change)
    said = f"{size + change} bytes found, {size} expected"
    refused(lambda: open_bundle(bundle), BundleError, bundle / name, said, kept=[bundle])


def test_m9_other_bytes_of_the_same_size(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((bundle / BACKBONE_DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / BACKBONE_DATA).write_bytes(data)
    found = verify(bundle)
    assert found.pop(BACKBONE_DATA).startswith(f"sha256 is {hashlib.sha256(data).hexdigest()}")
    assert set(found.values()) == {"ok"}
    command_refused(capsys, ["verify", bundle], bundle, kept=[bundle])


EXTRA = [
    *["evil.so", "evil.dll", "tokenizers.py", "sitecustomize.py", "onnxruntime/__init__.py"],
    *["numpy.cpython-311-x86_64-linux-gnu.so", f"{TABLES}/zarr.py", "__pycache__/json.cpython.pyc"],
]


def test_m10_programs_in_a_bundle_are_not_run(bundle: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in EXTRA:
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text(f"open({str(marker)!r}, 'w')\n")
    before = list(sys.path)
    with load_fixed(bundle) as model:
        model.logits([1, 2])
    with open_tables(bundle) as tables:
        tables[0, 1]
    assert set(verify(bundle).values()) == {"ok"}
    assert not marker.exists() and sys.path == before


@pytest.mark.parametrize("field", ["custom_ops", "model library", "backbone custom_op_library"])
def test_m11_a_manifest_that_asks_for_a_library(bundle: Path, field: str) -> None:
    """A manifest has no such field, and no graph of a bundle is ever read."""
    (bundle / "evil.so").write_bytes(b"\x7fELF")
    rewrite(bundle, {field: "evil.so"})
    refused(lambda: open_bundle(bundle), BundleError, bundle, "unknown field", kept=[bundle])


FEWER: dict[str, object] = {"model vocab_size": 299, "tables records": 299}


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (TABLES, FEWER, "the files are of different bundles"),
        (GGUF, FEWER, GGUF),
        (BACKBONE_DATA, {"model n_layers": 4}, "the weights of this model take"),
        (BACKBONE_DATA, {"model dim": 24}, "the weights of this model take"),
        (BACKBONE_DATA, {"backbone head": "int4"}, "the weights of this model take"),
    ],
)
def test_m12_a_backbone_of_another_model(
    file: str,
    change: dict[str, object],
    said: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    source = request.getfixturevalue("tiny_gguf" if file == GGUF else "tiny_bundle")
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    rewrite(copy, change)
    refused(lambda: load_fixed(copy), BundleError, copy / file, said)


def test_m12_a_tokenizer_with_more_tokens_than_the_model(bundle: Path) -> None:
    """A tokenizer may have tokens that no text leads to; one that a prompt has is named."""
    document = json.loads((bundle / TOKENIZER).read_bytes())
    document["added_tokens"].append({"id": 999, "content": "<more>", "special": True})
    document["model"]["vocab"]["<more>"] = 999
    seal(bundle, {TOKENIZER: json.dumps(document).encode()})

    def say_it() -> None:
        with load_fixed(bundle) as model:
            model.generate_text("<more>")

    refused(say_it, StemEdgeError, "999", "299")


def resized(more: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size + more)


@needs_links
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (link, "not a regular file"),
        (pipe, "not a regular file"),
        (resized(1), "bytes found"),
        (resized(-1), "bytes found"),
    ],
)
def test_m14_a_file_that_changes_before_it_is_opened(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], said: str
) -> None:
    open_file = disk.open_file

    def changing(path: Path) -> int:
        if path == bundle / TOKENIZER:
            change(path)
        return open_file(path)

    monkeypatch.setattr(disk, "open_file", changing)
    assert said in verify(bundle)[TOKENIZER]


def test_m14_a_file_that_is_exchanged_after_it_was_opened(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was opened is hashed, not the one that has taken its path since."""
    other = bundle.parent / "other"
    other.write_bytes(bytes((bundle / TOKENIZER).stat().st_size))
    read_piece = hashes.read_piece

    def exchanging(path: Path, *place: int) -> bytearray:
        if path == bundle / TOKENIZER and other.exists():
            other.replace(path)
        return read_piece(path, *place)

    monkeypatch.setattr(hashes, "read_piece", exchanging)
    assert verify(bundle)[TOKENIZER] == "ok"
    assert verify(bundle)[TOKENIZER].startswith("sha256 is")


@pytest.mark.parametrize("missing", [MANIFEST, TOKENIZER, SHARD, f"{TABLES}/records"])
def test_m15_half_a_bundle(bundle: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A partial copy never opens, whichever files are missing."""
    path = bundle / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for command in (["inspect"], ["inspect", "--json"], ["generate", "-p", "a"]):
        message = command_refused(capsys, [*command, bundle], bundle, kept=[bundle])
        assert "export" in message


READ_ONLY = """
import os, sys
import stem_edge
root, cache = sys.argv[1:]

def use():
    with stem_edge.load(root, cache_dir=cache) as model:
        return model.generate_text([1, 2, 3], max_new_tokens=3)

expected = use()  # whatever is imported is imported before the files are out of reach
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert not os.access(root, os.W_OK)
assert use() == expected
assert set(stem_edge.verify(root).values()) == {"ok"}
stem_edge.open_tables(root).close()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_m18_a_folder_that_can_only_be_read(tiny_bundle: Path) -> None:
    """Uses a folder that users other than root may enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        bundle = Path(shutil.copytree(tiny_bundle, Path(made) / "model"))
        (cache := Path(made) / "cache").mkdir()
        for path in [bundle, *bundle.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        cache.chmod(0o777)
        before = os.umask(0)  # because other users also read what root leaves in the cache
        try:
            done = subprocess.run(
                [sys.executable, "-c", READ_ONLY, str(bundle), str(cache)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            os.umask(before)
            for path in [bundle, *bundle.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.returncode == 0, done.stderr
