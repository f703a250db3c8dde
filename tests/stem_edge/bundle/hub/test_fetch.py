"""Models by name, fetched from a hub of our own that works, fails, sends wrong bytes and is cut off."""

from __future__ import annotations

import errno
import glob
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hub_server import PIECE_NBYTES, Blob, HubServer, Model, cache_of
from huggingface_hub import constants, errors
from installed import DEMO
from loading import load_fixed
from manifests import make_bundle

from stem_edge.bundle.hub import fetch
from stem_edge.bundle.manifest import (
    MANIFEST,
    TABLES,
    FileEntry,
    encode_manifest,
    open_manifest,
)
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, HubError, InputError
from stem_edge.graph.formats import BACKBONE_DATA, PREFILL_DATA

NAME = "acme/model"
SHARD = f"{TABLES}/records/c/0/0"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that opens, but does not run."""
    return make_bundle(tmp_path / "bundle")


def files_of(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def unfinished() -> list[str]:
    """What a download left, or leaves while this looks."""
    return glob.glob("**/*.incomplete", root_dir=cache_of(NAME), recursive=True)  # noqa: PTH207


def changed(data: bytes) -> bytes:
    """Return bytes of the same size with another last one."""
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_bundle_is_fetched_once(
    hub: HubServer, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "README.md").write_text("a card")
    commit = hub.add(NAME, bundle)
    opened = open_bundle(f"hf:{NAME}")
    assert opened.path == cache_of(NAME) / "snapshots" / commit
    (bundle / "README.md").unlink()
    assert files_of(opened.path) == files_of(bundle)
    assert capsys.readouterr().err == f"stem-edge: hf:{NAME} is commit {commit}\n"
    hub.requests.clear()
    assert open_bundle(f"hf:{NAME}").path == opened.path
    assert hub.requests == [f"GET /api/models/{NAME}"]
    hub.requests.clear()
    assert open_bundle(f"hf:{NAME}@{commit}").path == opened.path
    assert hub.requests == []


def test_shards_of_tables_elsewhere_are_not_fetched(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    mirror = "https://mirror/tables.zarr"
    opened = open_bundle(f"hf:{NAME}", mirror)
    assert opened.tables == mirror and (opened.path / TABLES / "zarr.json").is_file()
    assert not hub.asked(SHARD) and not (opened.path / SHARD).exists()
    with pytest.raises(BundleError, match="missing, and so are all shards"):
        open_bundle(opened.path)
    assert (open_bundle(f"hf:{NAME}").path / SHARD).exists()


def files_there(hub: HubServer) -> dict[str, Blob]:
    """Return the files of the hub's only commit, to be changed."""
    return next(iter(hub.models[NAME].commits.values()))


@pytest.mark.parametrize(
    ("change", "name", "parts"),
    [
        (lambda hub: None, "acme/other", ["Repository not found", "hf auth login"]),
        (lambda hub: None, f"{NAME}@v9", ["Invalid rev id: v9", "check its name and revision"]),
        (lambda hub: hub.models.update({NAME: Model()}), NAME, ["check its name and revision"]),
        (
            lambda hub: setattr(hub.models[NAME], "gated", True), NAME,
            ["Access to model acme/model is restricted", "ask for access", "hf auth login"],
        ),
        (lambda hub: hub.faults.status.update({"/api/models": 503}), NAME, ["answers 503", "try later"]),
        (lambda hub: hub.faults.status.update({"/api/models": 403}), NAME, ["answers 403", "wrong here"]),
        (lambda hub: hub.faults.status.update({"/resolve/": 503}), NAME, ["answers 503 (something is wrong here)"]),
        (lambda hub: hub.faults.status.update({"/resolve/": 416}), NAME, ["answers 416 (something is wrong here)"]),
        (lambda hub: hub.faults.status.update({"/api/models": 307}), NAME, ["redirect"]),
        (lambda hub: hub.faults.status.update({"/resolve/": 307}), NAME, ["redirect"]),
        (lambda hub: hub.models[NAME].commit({"a.txt": Blob(b"")}), NAME, ["not a bundle", "stem-edge export"]),
        (lambda hub: hub.models[NAME].commit({MANIFEST: Blob(b"{}")}), NAME, ["not a manifest", "or delete"]),
        (lambda hub: files_there(hub).pop(BACKBONE_DATA), NAME, [f"no file {BACKBONE_DATA}", "push it again"]),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_told(
    hub: HubServer, bundle: Path, change: Callable[[HubServer], object], name: str, parts: list[str]
) -> None:
    hub.add(NAME, bundle)
    change(hub)
    with pytest.raises((HubError, BundleError)) as caught:
        open_bundle(f"hf:{name}")
    said = str(caught.value)
    assert all(part in said for part in parts), said
    assert "\n" not in said
    assert not unfinished()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (changed, rf"{SHARD}: sha256 is \w+, expected \w+; delete .*blobs.*push it again"),
        (lambda data: data + b"x", rf"{SHARD}: (sha256|\d+ bytes)|connection to the hub failed"),
    ],
)
def test_wrong_bytes_are_refused_until_they_are_deleted(
    hub: HubServer, bundle: Path, wrong: Callable[[bytes], bytes], said: str
) -> None:
    hub.add(NAME, bundle)
    hub.faults.wrong[SHARD] = wrong((bundle / SHARD).read_bytes())
    for _ in range(2):  # nothing of it is taken for right later
        with pytest.raises((BundleError, HubError), match=said):
            open_bundle(f"hf:{NAME}")
    hub.faults.wrong.clear()
    for shard in cache_of(NAME).glob(f"snapshots/*/{SHARD}"):
        shard.resolve().unlink()
    assert files_of(open_bundle(f"hf:{NAME}").path) == files_of(bundle)


def test_wrong_bytes_of_another_program_are_refused(hub: HubServer, bundle: Path) -> None:
    """What is in the cache already was perhaps never compared with anything."""
    hub.add(NAME, bundle)
    shard = open_bundle(f"hf:{NAME}", "https://mirror/tables.zarr").path / SHARD
    shard.parent.mkdir(parents=True)
    (cache_of(NAME) / "blobs" / "other").write_bytes(bytes((bundle / SHARD).stat().st_size))
    shard.symlink_to("../../../../../../blobs/other")
    with pytest.raises(BundleError, match=rf"{SHARD}: sha256"):
        open_bundle(f"hf:{NAME}")
    shard.unlink()
    open_bundle(f"hf:{NAME}")


def large_bundle(folder: Path) -> Path:
    """Make a bundle with a file of 30 MB."""
    data = b"large" * 600_000
    manifest = open_manifest(make_bundle(folder))
    entry = FileEntry(len(data), str(Blob(data).sha256))
    (folder / PREFILL_DATA).write_bytes(data)
    more = msgspec.structs.replace(manifest, files={**manifest.files, PREFILL_DATA: entry})
    (folder / MANIFEST).write_bytes(encode_manifest(more))
    return folder


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    folder = large_bundle(tmp_path / "bundle")
    hub.add(NAME, folder)
    hub.faults.cuts = {PREFILL_DATA: [300_000 * n for n in range(1, 10)]}
    opened = open_bundle(f"hf:{NAME}")
    assert hub.faults.cuts == {PREFILL_DATA: []}
    assert files_of(opened.path) == files_of(folder)
    assert not unfinished()
    # Each byte was sent once; those in flight twice.
    assert hub.sent <= sum(map(len, files_of(folder).values())) + 9 * PIECE_NBYTES


def test_connections_that_are_always_cut_are_given_up(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    hub.faults.cuts, hub.faults.reset = {BACKBONE_DATA: [5] * 100}, True
    with pytest.raises(HubError, match=r"the connection to the hub failed .*; check the network"):
        open_bundle(f"hf:{NAME}")
    hub.faults.cuts.clear()
    assert files_of(open_bundle(f"hf:{NAME}").path) == files_of(bundle)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/cache/blob"), "/cache/blob: cannot be wr"),
        (PermissionError(errno.EACCES, "Permission denied"), "the hub's cache: cannot be written"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "the connection"),
        (OSError("Consistency check failed\n  twice."), r"\(Consistency check failed twice\)"),
        (errors.LocalEntryNotFoundError("there is none"), r"is not in the cache \(there is none\)"),
    ],
)  # fmt: skip
def test_errors_of_the_system_are_told(
    hub: HubServer, bundle: Path, error: Exception, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    hub.add(NAME, bundle)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(HubError, match=part):
        open_bundle(f"hf:{NAME}")


@pytest.mark.parametrize("how", ["offline", "gone", "failing"])
def test_without_a_network_the_cache_is_used(
    hub: HubServer, bundle: Path, how: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    commit = hub.add(NAME, bundle)
    path = open_bundle(f"hf:{NAME}").path
    capsys.readouterr()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "gone":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.faults.status[""] = 503
    assert open_bundle(f"hf:{NAME}").path == path
    assert f"hf:{NAME} is commit {commit} in the cache" in capsys.readouterr().err
    assert open_bundle(f"hf:{NAME}@{commit}").path == path
    for other in (f"{NAME}@v9", "acme/other", f"{NAME}@{'0' * 40}"):
        with pytest.raises(HubError) as caught:
            open_bundle(f"hf:{other}")
        assert ("unset HF_HUB_OFFLINE" in str(caught.value)) == (how == "offline")


def test_a_silent_hub_is_given_up(
    hub: HubServer, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, bundle)
    path = open_bundle(f"hf:{NAME}").path
    monkeypatch.setattr(fetch, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert open_bundle(f"hf:{NAME}").path == path
        for other in ("hf:acme/other", f"hf:acme/other@{'0' * 40}"):
            with pytest.raises(HubError, match=r"the connection to the hub failed .*timed out"):
                open_bundle(other)


@pytest.mark.parametrize("address", ["notaurl", "http://"])
def test_what_is_no_address_of_a_hub(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubError, match="connection to the hub failed"):
        open_bundle("hf:acme/other")
    with pytest.raises(InputError, match="expected hf:org/name"):
        load_fixed("hf:model")


@pytest.mark.slow
def test_a_killed_fetch_keeps_what_was_complete(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    hub.faults.seconds = 0.2
    code = f"import stem_edge; stem_edge.open_bundle('hf:{NAME}')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (unfinished() and len([*(cache_of(NAME) / "snapshots").glob("*/*")]) > 1):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {p.partition("/")[2] for p in files_of(cache_of(NAME) / "snapshots")}
    hub.faults.seconds = 0.0
    hub.requests.clear()
    assert files_of(open_bundle(f"hf:{NAME}").path) == files_of(bundle)
    for name in kept:
        assert not hub.asked(f"GET /{NAME}/resolve/{name}")


@pytest.fixture
def demo(hub: HubServer) -> Iterator[str]:
    """The name of the demo's model on the hub."""
    hub.add(NAME, DEMO)
    yield f"hf:{NAME}"


@pytest.mark.slow
def test_commands_take_names(demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", demo, "Once", "-n", "2"]) == 0
    assert main(["generate", str(DEMO), "Once", "-n", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert main(["verify", demo]) == 0
    assert main(["inspect", demo, "--json"]) == 0
    assert "as exported" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_on_a_hub_is_edited(demo: str, tmp_path: Path) -> None:
    edit = str(tmp_path / "france.edit")
    assert main(["edit", demo, "--source", " France", "--target", " Spain", "-o", edit]) == 0
    assert main(["generate", demo, "In France", "-n", "1", "--edit", edit]) == 0
    assert {p.name for p in (cache_of(NAME) / "snapshots").iterdir()} == {
        open_bundle(demo).path.name
    }
