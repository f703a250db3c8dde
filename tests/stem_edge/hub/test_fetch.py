"""Models by name, fetched from a hub of our own that works, fails, lies and is cut off."""

from __future__ import annotations

import errno
import glob
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hub_server import PIECE_NBYTES, Blob, HubServer, Model, cache_of
from huggingface_hub import HfFileSystem, constants, errors, get_session
from installed import DEMO
from manifests import make_bundle
from stores import write_store

import stem_edge
from stem_edge.bundle import fetched, push
from stem_edge.bundle.manifest import MANIFEST, TABLES
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, HubError, InputError
from stem_edge.graph.formats import BACKBONE_DATA, EngineName
from stem_edge.hub import fetch
from stem_edge.hub.asking import asking
from stem_edge.hub.names import HubName
from stem_edge.runtime.rows.store import open_store
from stem_edge.system.user_folder import cache_folder
from stem_edge.tables.rows import RecordLayout

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


def test_what_was_checked_is_not_hashed_again(
    hub: HubServer, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, bundle)
    opened = open_bundle(f"hf:{NAME}")
    monkeypatch.setattr(fetched, "sha256_of", None)  # which would raise TypeError
    open_bundle(f"hf:{NAME}")
    blob = (opened.path / SHARD).resolve()
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.undo()
    assert hub.url  # still there
    with pytest.raises(BundleError, match=rf"{SHARD}: sha256 is .* deleted from the cache"):
        fetched.check(
            fetch.Snapshot(HubName(NAME, opened.path.name), opened.path),
            {SHARD: fetched.Expected(len(data), "0" * 64)},
        )
    assert not blob.exists() and not (opened.path / SHARD).is_symlink()


def test_a_revision_is_what_it_says(hub: HubServer, bundle: Path) -> None:
    first = hub.add(NAME, bundle)
    (bundle / "notes.txt").write_text("new")
    second = hub.add(NAME, bundle)
    hub.models[NAME].refs["v1"] = first
    assert open_bundle(f"hf:{NAME}@v1").path.name == first
    assert open_bundle(f"hf:{NAME}").path.name == second
    assert len(hub.asked(f"resolve/{second}/{BACKBONE_DATA}")) <= 1  # HEAD: the blob is there


def refused_by(hub: HubServer, change: Callable[[HubServer], object], name: str = NAME) -> str:
    """Return the message for a name after a change."""
    change(hub)
    with pytest.raises((HubError, BundleError)) as caught:
        open_bundle(f"hf:{name}")
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "name", "parts"),
    [
        (lambda hub: None, "acme/other", ["no such model", "Repository not found", "hf auth login"]),
        (lambda hub: None, f"{NAME}@v9", ["no such revision", "Invalid rev id: v9"]),
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
        (
            lambda hub: hub.models[NAME].commit({MANIFEST: Blob(b"{}")}), NAME, ["not a manifest"],
        ),
        (
            lambda hub: next(iter(hub.models[NAME].commits.values())).pop(BACKBONE_DATA), NAME,
            [f"no file {BACKBONE_DATA}", "push it again"],
        ),
        (
            lambda hub: next(iter(hub.models[NAME].commits.values())).update({BACKBONE_DATA: Blob(b"x")}),
            NAME, [f"{BACKBONE_DATA} has 1 bytes on the hub"],
        ),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_told(
    hub: HubServer, bundle: Path, change: Callable[[HubServer], object], name: str, parts: list[str]
) -> None:
    hub.add(NAME, bundle)
    said = refused_by(hub, change, name)
    assert all(part in said for part in parts), said
    assert "\n" not in said
    assert not unfinished()


def test_space_is_looked_at_before_the_first_byte(
    hub: HubServer, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, bundle)
    nbytes = (bundle / MANIFEST).stat().st_size
    full = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=nbytes))
    monkeypatch.setattr(fetch, "shutil", full)
    with pytest.raises(HubError, match=r"needs .* more, and .* has .* free; .*HF_HUB_CACHE"):
        open_bundle(f"hf:{NAME}")
    assert len(hub.asked("GET /acme/model/resolve/")) == 1  # the manifest


@pytest.mark.parametrize("reset", [False, True])
def test_cut_connections(hub: HubServer, tmp_path: Path, reset: bool) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(DEMO, folder)
    hub.add(NAME, folder)
    nbytes = (folder / BACKBONE_DATA).stat().st_size
    # After a reset, huggingface_hub begins the file again.
    cuts = [nbytes * n // 11 for n in range(1, 4 if reset else 11)]
    hub.faults.cuts, hub.faults.reset = {BACKBONE_DATA: list(cuts)}, reset
    opened = open_bundle(f"hf:{NAME}")
    assert hub.faults.cuts == {BACKBONE_DATA: []}
    assert files_of(opened.path) == files_of(folder)
    assert not unfinished()
    if not reset:  # each byte was written once; what was in flight, twice
        assert hub.sent <= sum(map(len, files_of(folder).values())) + len(cuts) * PIECE_NBYTES


def test_connections_that_are_always_cut_are_given_up(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    hub.faults.cuts, hub.faults.reset = {BACKBONE_DATA: [5] * 100}, True
    with pytest.raises(HubError, match="the connection to the hub failed"):
        open_bundle(f"hf:{NAME}")
    # Some tries more than that where others completed files, or the library itself tried again.
    assert fetch.TRIES <= 100 - len(hub.faults.cuts[BACKBONE_DATA]) < 100
    assert not unfinished()
    hub.faults.cuts.clear()
    open_bundle(f"hf:{NAME}")


def test_wrong_bytes_are_refused(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    right = (bundle / SHARD).read_bytes()
    hub.faults.wrong[SHARD] = right[:-1] + bytes([right[-1] ^ 1])
    for _ in range(2):  # nothing of it is taken for right later
        with pytest.raises(BundleError, match=rf"{SHARD}: sha256 is \w+, expected") as caught:
            open_bundle(f"hf:{NAME}")
        assert "ask whoever pushed acme/model" in str(caught.value)
    assert hub.faults.wrong[SHARD] not in files_of(cache_of(NAME)).values()
    hub.faults.wrong.clear()
    assert files_of(open_bundle(f"hf:{NAME}").path) == files_of(bundle)


def test_wrong_sizes_are_refused(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    hub.faults.wrong[SHARD] = (bundle / SHARD).read_bytes() + b"x"
    with pytest.raises(
        BundleError, match=rf"{SHARD}: \d+ bytes found, \d+ expected; it is deleted"
    ):
        open_bundle(f"hf:{NAME}")
    assert hub.faults.wrong[SHARD] not in files_of(cache_of(NAME)).values()


@pytest.mark.parametrize(
    ("error", "part", "tries"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/cache/blob"), "/cache/blob: cannot be wr", 1),
        (PermissionError(errno.EACCES, "Permission denied"), "the hub's cache: cannot be written", 1),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "the connection", 5),
        (OSError("Consistency check failed\n  twice."), r"\(Consistency check failed twice\)", 5),
        (errors.LocalEntryNotFoundError("there is none"), r"is not in the cache \(there is none\)", 1),
    ],
)  # fmt: skip
def test_errors_of_the_system_are_told(
    hub: HubServer, bundle: Path, error: Exception, part: str, tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise error

    hub.add(NAME, bundle)
    monkeypatch.setattr(fetch, "_download", fail)
    with pytest.raises(HubError, match=part):
        open_bundle(f"hf:{NAME}")
    assert len(calls) == tries


def test_words_of_a_hub_command_no_terminal(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    hub.faults.said = "\x1b]0;title\x07 " + "long " * 200
    said = refused_by(hub, lambda hub: hub.faults.status.update({"/api/models": 403}))
    assert "answers 403" in said and said.isprintable() and len(said) < 500


def test_a_mistake_of_ours_is_not_the_hubs(
    hub: HubServer, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, bundle)
    monkeypatch.setattr(fetch, "_download", None)
    with pytest.raises(TypeError):
        open_bundle(f"hf:{NAME}")


def test_wrong_bytes_of_another_program_are_refused(hub: HubServer, bundle: Path) -> None:
    """What is in the cache already was perhaps never compared with anything."""
    hub.add(NAME, bundle)
    opened = open_bundle(f"hf:{NAME}", tables_later=True)
    shard = opened.path / SHARD
    shard.parent.mkdir(parents=True)
    (cache_of(NAME) / "blobs" / "other").write_bytes(bytes((bundle / SHARD).stat().st_size))
    shard.symlink_to("../../../../../../blobs/other")
    with pytest.raises(BundleError, match=rf"{SHARD}: sha256"):
        open_bundle(f"hf:{NAME}")
    assert not (cache_of(NAME) / "blobs" / "other").exists()
    open_bundle(f"hf:{NAME}")


@pytest.mark.parametrize("said", ["right", "another", "nothing"])
def test_a_wrong_file_that_repositories_share_is_removed_if_the_hub_agrees(
    tmp_path: Path, hub: HubServer, said: str
) -> None:
    repository, digest = tmp_path / "models--acme--model", "ab" + "0" * 62
    folder, store = repository / "snapshots" / ("0" * 40), tmp_path / "blobs" / "ab"
    for made in (folder, store, repository / "blobs"):
        made.mkdir(parents=True)
    (store / digest).write_bytes(b"wrong")
    (repository / "blobs" / "etag").symlink_to(f"../../blobs/ab/{digest}")
    (folder / "file").symlink_to("../../blobs/etag")
    (folder / "odd").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_bytes(b"not the hub's")
    hub.models[NAME] = Model()
    blob = Blob(b"right" * 1000)
    commit = hub.models[NAME].commit({"file": blob})
    if said == "nothing":
        hub.faults.status[""] = 400
    snapshot = fetch.Snapshot(HubName(NAME, commit), folder)
    for file in ("file", "odd", "none"):
        fetch.remove(snapshot, file, blob.sha256 if said != "another" else "f" * 64)
    left = {path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()}
    assert left == {tmp_path / "mine", store / digest} - (
        {store / digest} if said == "right" else set()
    )


def test_tables_later(hub: HubServer, bundle: Path) -> None:
    commit = hub.add(NAME, bundle)
    opened = open_bundle(f"hf:{NAME}", tables_later=True)
    assert opened.tables == f"hf://{NAME}@{commit}/{TABLES}"
    assert not hub.asked(SHARD) and not (opened.path / SHARD).exists()
    assert (opened.path / TABLES / "zarr.json").is_file()
    mirror = "https://mirror/tables.zarr"
    for later in (False, True):
        there = open_bundle(f"hf:{NAME}", mirror, tables_later=later)
        assert (there.tables, there.path) == (mirror, opened.path)
    assert not hub.asked(SHARD)
    # Workers get the folder.
    assert open_bundle(opened.path, tables_later=True) == opened
    with pytest.raises(BundleError, match="missing, and so are all shards"):
        open_bundle(opened.path)
    assert open_bundle(f"hf:{NAME}").tables is None
    with pytest.raises(InputError, match="tables_later is for models on a hub"):
        open_bundle(bundle, tables_later=True)


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
    monkeypatch.setattr(push, "asking", partial(asking, seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert open_bundle(f"hf:{NAME}").path == path
        with pytest.raises(HubError, match=r"the connection to the hub failed .*timed out"):
            open_bundle("hf:acme/other")
        with pytest.raises(HubError, match=r"the connection to the hub failed .*timed out"):
            push.push(bundle, "acme/other")
    assert get_session().timeout.read is None  # others have the client, too


@pytest.mark.parametrize("address", ["notaurl", "", "http://"])
def test_what_is_no_address_of_a_hub(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubError, match=f"HF_ENDPOINT is '{address}', expected an address"):
        open_bundle("hf:acme/other")


def test_a_newer_commit_that_did_not_come_leaves_the_older_one(
    hub: HubServer, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, bundle)
    path = open_bundle(f"hf:{NAME}").path
    newer = hub.add(NAME, shutil.copytree(DEMO, bundle.with_name("newer")))
    hub.faults.status["/resolve/"] = 403
    with pytest.raises(HubError):
        open_bundle(f"hf:{NAME}")
    assert fetch.pinned(f"hf:{NAME}") == f"hf:{NAME}@{newer}"
    hub.faults.status[""] = 503
    assert open_bundle(f"hf:{NAME}").path == path
    hub.faults.status.clear()
    assert open_bundle(f"hf:{NAME}").path.name == newer
    hub.faults.status[""] = 503
    assert open_bundle(f"hf:{NAME}").path.name == newer


@pytest.mark.slow
def test_a_killed_fetch_goes_on(hub: HubServer, bundle: Path) -> None:
    hub.add(NAME, bundle)
    hub.faults.seconds = 0.2
    (bundle / "big").write_bytes(bytes(1))
    code = f"import stem_edge; stem_edge.open_bundle('hf:{NAME}')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (unfinished() and len([*(cache_of(NAME) / "snapshots").glob("*/*")]) > 1):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {p.partition("/")[2] for p in files_of(cache_of(NAME) / "snapshots")}
    assert unfinished()
    hub.faults.seconds = 0.0
    hub.requests.clear()
    open_bundle(f"hf:{NAME}")
    assert not unfinished()
    for name in kept:
        assert not hub.asked(f"GET /{NAME}/resolve/{name}")


@pytest.fixture
def demo(hub: HubServer) -> Iterator[str]:
    """The name of the demo's model on the hub."""
    hub.add(NAME, DEMO)
    yield f"hf:{NAME}"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reads": "mmap", "resident": True}, {"repack": True}])
def test_engines_read_the_cache(
    hub: HubServer, tiny: Path, engine: EngineName, options: dict[str, Any]
) -> None:
    if "repack" in options and engine != "ggml":
        return
    hub.add(NAME, tiny)
    tokens = []
    for path in (tiny, f"hf:{NAME}"):
        with stem_edge.load(path, engine=engine, trial=True, **options) as model:
            chunks = model.generate([1, 2, 3], max_new_tokens=8)
            tokens.append([token for chunk in chunks for token in chunk.token_ids])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_workers_get_the_folder(
    demo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", demo, "--new-tokens", "2", "--prompt-tokens", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    folder = str(open_bundle(demo).path)
    assert found["bundle"] == folder
    (text := tmp_path / "text").write_text("The capital of Spain is Madrid.")
    assert main(["eval", demo, "--text", str(text), "--against", demo, "--json"]) == 0
    assert main(["fit", demo, "--bandwidth", "17GB", "--json"]) == 0
    assert main(["inspect", demo, "--memory", "4GB"]) == 0
    assert main(["verify", demo, "--runs"]) == 0


@pytest.mark.slow
def test_commands_take_names(demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", demo, "Once", "-n", "2", "--no-prepare", "--reads", "mmap"]) == 0
    assert main(["generate", str(DEMO), "Once", "-n", "2", "--no-prepare"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert main(["verify", demo]) == 0
    assert main(["inspect", demo, "--json"]) == 0
    assert "safe to load" in capsys.readouterr().out


@pytest.mark.slow
def test_edits_of_a_model_on_a_hub_lie_in_the_current_folder(
    demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["--source", " France", "--target", " Spain", "--json"]
    assert main(["edit", demo, *names]) == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    assert path.absolute().parent == tmp_path
    assert main(["generate", demo, "In France", "-n", "1", "--edit", path.name]) == 0
    assert {p.name for p in (cache_of(NAME) / "snapshots").iterdir()} == {
        open_bundle(demo).path.name
    }


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="expected hf:org/name"):
        stem_edge.load("hf:model")


def test_models_of_the_hub_are_private(hub: HubServer) -> None:
    hub.models[NAME] = Model()
    with pytest.raises(HubError, match="no such revision"):
        open_bundle(f"hf:{NAME}")


def test_lists_of_checked_files_are_kept_and_removed(
    hub: HubServer, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, bundle)
    path = open_bundle(f"hf:{NAME}").path
    capsys.readouterr()

    def listed() -> list[tuple[str, str]]:
        assert main(["cache", "--json"]) == 0
        entries = json.loads(capsys.readouterr().out)["entries"]
        return [(each["of"], each["stale"]) for each in entries if each["kind"] == "checked"]

    assert listed() == [(str(path), "")]
    shutil.rmtree(cache_of(NAME))
    assert listed() == [(str(path), "its model is gone")]
    (lost,) = cache_folder(None).glob("checked/*.json")
    lost.write_text("{")
    assert listed() == [("", "damaged")]
    open_bundle(f"hf:{NAME}")
    assert listed() == [(str(path), "")]


def test_of_tables_that_come_later_only_records_are_read(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RecordLayout(
        records=128, layers=(1,), parts=((65536,),), row_type="int8", group_size=128
    )
    records = np.zeros((128, layout.record_nbytes), np.uint8)  # more than fsspec reads ahead
    format = write_store(tmp_path / TABLES, layout, records, records_per_shard=128)
    commit = hub.add(NAME, tmp_path)
    # As HF_ENDPOINT does in a new process.
    usual = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + usual)
    HfFileSystem.clear_instance_cache()
    with open_store(tmp_path / TABLES, format, url=f"hf://{NAME}@{commit}/{TABLES}") as store:
        assert np.array_equal(store.read(np.array([9])), records[[9]])
        assert store.traffic is not None
        assert hub.sent == store.traffic.nbytes == layout.record_nbytes + 4 + 4
    HfFileSystem.clear_instance_cache()
