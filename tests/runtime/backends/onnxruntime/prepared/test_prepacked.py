"""Prepacked backbones: the same logits, made only once, and loading without them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from every_kind import GEMMA_3N, checkpoint_of

import stem_edge
from stem_edge.bundle import prefill_check
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, BundleError, RowReadError
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.interface import SIZES, StepCosts
from stem_edge.runtime.backends.onnxruntime import loaded as backend_ort
from stem_edge.runtime.backends.onnxruntime.needs import APART_LAYER_NBYTES
from stem_edge.runtime.backends.onnxruntime.prepared import looking, preparing
from stem_edge.runtime.backends.onnxruntime.prepared import prepack_worker as prepare_worker
from stem_edge.runtime.backends.onnxruntime.prepared import prepacked as module
from stem_edge.runtime.backends.onnxruntime.prepared.folder import begin
from stem_edge.runtime.backends.onnxruntime.prepared.packing import OtherProductsError, Packer
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    RECORD,
    prepared_folder,
    read_prepared,
)
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, open_session
from stem_edge.system.child import Ended

IDS = [256, *b"twelve tokens or so"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, prefill_graph=True)
    return out


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LEAST_NBYTES", 0)


@pytest.fixture(scope="module")
def made(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the prepacked backbone. Do not change it."""
    folder = tmp_path_factory.mktemp("made")
    preparing.make(open_bundle(bundle), folder, 1, None)
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(made, tmp_path / "own")
    return tmp_path / "own"


def sources(monkeypatch: pytest.MonkeyPatch) -> list[Path | GraphSource]:
    """Record what graphs are loaded from."""
    real, seen = open_session, list[Path | GraphSource]()

    def watch(graph: Path | GraphSource, *rest: object, **more: object) -> object:
        seen.append(graph)
        return real(graph, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(backend_ort, "open_session", watch)
    return seen


@pytest.mark.parametrize("prefill", [True, False])
def test_the_same_logits_from_its_files(
    bundle: Path, made: Path, monkeypatch: pytest.MonkeyPatch, prefill: bool
) -> None:
    with stem_edge.load(bundle, prepare=False, prefill_graph=prefill) as model:
        expected = model.logits(IDS)
    seen, given_back = sources(monkeypatch), list[tuple[int, dict[Path, int]]]()
    monkeypatch.setattr(
        module, "give_back_mapped", lambda files: given_back.append((len(seen), files))
    )
    with stem_edge.load(bundle, cache_dir=made, prefill_graph=prefill) as model:
        assert np.array_equal(model.logits(IDS), expected)
    from_cache = {one.name for one in seen if isinstance(one, Path) and one.is_relative_to(made)}
    assert from_cache == {"step.onnx", *(("prefill.onnx", "head.onnx") if prefill else ())}
    (folder,) = (made / "prepared").iterdir()
    assert not (folder / "head.onnx.data").exists()  # because its weights are in that of the step
    record = read_prepared(folder)
    assert record is not None
    names = {name for name in record.files if name.endswith(".data")}
    files = {folder.resolve() / name: record.files[name][0] for name in names}
    assert [count for count, _ in given_back] == ([2, 4] if prefill else [2])
    for _, places in given_back:
        assert places.keys() == files.keys() and all(0 < places[f] < files[f] for f in files)


@pytest.mark.parametrize(("name", "backbone"), [("biases", "int4"), (GEMMA_3N, "fp32")])
def test_the_same_logits_where_onnxruntime_joins_nodes(
    name: str, backbone: str, tmp_path: Path
) -> None:
    checkpoint, out = checkpoint_of(name, tmp_path / "checkpoint"), tmp_path / "bundle"
    options: dict[str, Any] = {"backbone": backbone, "prefill_graph": False}
    stem_edge.export_bundle(checkpoint, out, **options)
    found = list[Any]()
    for prepare in (True, False):
        with stem_edge.load(out, prepare=prepare, threads=1) as model:
            found.append(model.logits([7 * n % 50 for n in range(20)]))
    assert np.array_equal(*found)


def test_weights_that_stay_in_the_bundle_give_the_same_logits(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for packed matrices round inputs to 8 bits, those for others do not."""
    seen, found = sources(monkeypatch), list[Any]()
    for pack in (True, False):
        with stem_edge.load(bundle, prepare=False, pack=pack) as model:
            found.append(model.logits(IDS))
        assert all(isinstance(one, GraphSource) and one.packed == pack for one in seen)
        seen.clear()
    assert prefill_check.mean_divergence(*found) < 1e-4


def test_the_first_load_makes_it_and_the_second_uses_it(bundle: Path, tmp_path: Path) -> None:
    with stem_edge.load(bundle, cache_dir=tmp_path, threads=1):
        pass
    (folder,) = (tmp_path / "prepared").iterdir()
    record = read_prepared(folder)
    assert record is not None
    assert record.bundle == str(bundle.resolve())
    assert record.prefill == (record.seconds["prefill"] < record.seconds["decode"])
    assert record.steps is not None and list(record.steps.times) == [1, 2, 4, 8]
    costs = record.steps if record.steps.sure and record.steps.same_bits else None
    before = (folder / RECORD).stat().st_mtime_ns
    with stem_edge.load(bundle, cache_dir=tmp_path, threads=1) as model:
        assert (model.stepping.speculation and model.stepping.speculation.costs) == costs
    assert (folder / RECORD).stat().st_mtime_ns == before
    with stem_edge.load(bundle, cache_dir=tmp_path, threads=1, exact=True) as model:
        assert (model.stepping.speculation is not None) == (costs is not None)
        assert model.stepping.costs == record.steps


@pytest.mark.slow
def test_preparing_again_measures_steps_that_could_not_be_measured(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(opened: Bundle, folder: Path, *_: object) -> Ended:
        prepare_worker.make(opened, folder, 1, "fp32")
        return Ended(0, b"", b"")

    monkeypatch.setattr(preparing, "_run_worker", work)
    unsure = StepCosts(seconds=0.1, times={1: 1.0, 2: 1.0}, same_bits=True, threads=1, sure=False)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_worker, "measure_steps", lambda *_: unsure)
        assert preparing.make(open_bundle(bundle), tmp_path, 1, None).record.steps == unsure
    with stem_edge.load(bundle, cache_dir=tmp_path, threads=1) as model:
        assert model.stepping.speculation is None
    with stem_edge.load(bundle, cache_dir=tmp_path, threads=1, speculate=True) as model:
        assert model.stepping.speculation is not None and model.stepping.speculation.costs != unsure
    assert preparing.make(open_bundle(bundle), tmp_path, 1, None).record.steps != unsure


def test_preparing_measures_whether_the_graph_for_prompts_is_exact(bundle: Path, own: Path) -> None:
    (folder,) = (own / "prepared").iterdir()
    record, promised = read_prepared(folder), open_bundle(bundle).manifest.report
    assert record is not None
    assert record.prefill_from_decode == pytest.approx(promised.prefill_from_decode, rel=0.01)
    fast = msgspec.structs.replace(record, prefill=True)
    for found, refused in ((0.0, ""), (9.0, "it diverges 9 nats")):
        record = msgspec.structs.replace(fast, prefill_from_decode=found)
        (folder / RECORD).write_bytes(msgspec.json.encode(record))
        with stem_edge.load(bundle, cache_dir=own) as model:
            assert model.plan.prefill_refused.startswith(refused)
            assert model.plan.prefill == (not refused)


def test_a_large_graph_for_prompts_that_nobody_measured_is_not_used(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_check, "TRIED_NBYTES", 0)
    plan = partial(stem_edge.memory_plan, bundle, cache_dir=tmp_path)
    refused = "is measured when the backbone is prepared"
    assert refused in plan(prepare=False).prefill_refused and not plan(prepare=False).prefill
    assert plan(prepare=False, prefill_graph=True).prefill
    assert plan().prefill


@pytest.mark.parametrize("faster", [True, False])
def test_the_measured_graph_takes_prompts(
    bundle: Path, own: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    (folder,) = (own / "prepared").iterdir()
    record = json.loads((folder / RECORD).read_bytes())
    (folder / RECORD).write_text(json.dumps(record | {"prefill": faster}))
    seen = sources(monkeypatch)
    with stem_edge.load(bundle, cache_dir=own) as model:
        model.logits(IDS)
        assert ("prefill.onnx" in {one.name for one in seen}) == faster


def test_a_small_backbone_is_not_prepared(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "LEAST_NBYTES", 1 << 30)
    with stem_edge.load(bundle, cache_dir=tmp_path, warm_start=False):
        pass
    assert not (tmp_path / "prepared").exists()


def unprepared(bundle: Path, cache_dir: Path, message: str) -> None:
    """Check that a load works and warns why it is not prepacked."""
    with (
        pytest.warns(preparing.NotPrepared, match=message),
        stem_edge.load(bundle, cache_dir=cache_dir, threads=1) as model,
    ):
        assert np.isfinite(model.logits(IDS)).all()


def test_a_folder_that_cannot_be(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unprepared(bundle, tmp_path / "file", "cannot keep a prepared backbone there")


def test_a_full_disk(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    unprepared(bundle, tmp_path, "takes [0-9,]+ bytes, 1,000 are free")
    assert list((tmp_path / "prepared").iterdir()) == []


def test_too_little_memory(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "available_memory", lambda: 1_000_000)
    sizes = r"preparing takes [0-9.]+ MB of memory beside [0-9.]+ [MG]B of this process, but [0-9.]+ [MG]B"
    unprepared(bundle, tmp_path, sizes)


def test_the_plan_says_what_the_first_load_takes(
    bundle: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = partial(stem_edge.memory_plan, bundle, cache_dir=tmp_path)
    needs = plan().preparing
    assert needs is not None and needs.memory > 50_000_000
    with monkeypatch.context() as without:
        without.setattr("stem_edge.runtime.backends.onnxruntime.needs.APART_LAYER_NBYTES", 0)
        layers = open_bundle(bundle).manifest.model.n_layers
        less = plan().preparing
    assert less is not None
    assert needs.memory - less.memory == APART_LAYER_NBYTES * layers * len(SIZES)
    made = sum(path.stat().st_size for path in own.glob("prepared/*/*.data"))
    assert needs.disk / 2 < made < 1.3 * needs.disk  # packing pads tiny matrices more than others
    assert plan(prepare=False).preparing is None
    assert stem_edge.memory_plan(bundle, cache_dir=own).preparing is None


def test_a_worker_that_fails_says_why(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    opened, path = open_bundle(broken), broken / "backbone.onnx.data"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(BundleError, match=r"backbone\.onnx\.data: sha256 is"):
        preparing.make(opened, tmp_path, 1)
    monkeypatch.setattr(preparing, "check_hashes", lambda *_: None)
    path.write_bytes(b"")
    with pytest.raises(BackendError, match=r"cannot be prepared: .*backbone\.onnx\.data"):
        preparing.make(opened, tmp_path, 1)
    assert list((tmp_path / "prepared").iterdir()) == []


@pytest.mark.slow
def test_saved_graphs_that_compute_something_else_are_refused_once(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """They are accepted on a later try, when they compute the same."""

    tries = list[Path]()

    def refuse(packer: Packer, name: str, graph: object) -> None:
        raise OtherProductsError(name)

    def work(opened: Bundle, folder: Path, *_: object) -> Ended:
        tries.append(folder)
        prepare_worker.make(opened, folder, 1, "fp32")
        return Ended(0, b"", b"")

    monkeypatch.setattr(preparing, "_run_worker", work)
    with monkeypatch.context() as patch:
        patch.setattr(Packer, "pack", refuse)
        unprepared(
            bundle, tmp_path, "computes other logits from packed weights on this processor; it"
        )
    with warnings.catch_warnings(), stem_edge.load(bundle, cache_dir=tmp_path) as model:
        warnings.simplefilter("error")
        assert len(tries) == 1
        assert model.plan.weights == stem_edge.memory_plan(bundle, cache_dir=tmp_path).weights
    assert main(["prepare", str(bundle), "--cache-dir", str(tmp_path)]) == 0
    assert len(tries) == 2
    assert module.place(open_bundle(bundle), tmp_path).prepared is not None


def test_a_worker_that_is_killed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BackendError, match="cannot be prepared: exit status 1"):
        preparing.make(open_bundle(bundle), tmp_path, 1)


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "lost to a power cut"])
def test_an_interrupted_one_goes_on(
    bundle: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    real, packed = Packer._pack_matrix, list[str]()

    def pack(packer: Packer, graph: Graph, *rest: Any) -> None:
        if len(packed) == 5:
            (packer.folder / "matrix-0").mkdir()
            raise KeyboardInterrupt
        packed.extend(graph.outputs)
        real(packer, graph, *rest)

    def work(opened: Bundle, folder: Path, *_: object) -> Ended:
        prepare_worker.make(opened, folder, 1, "fp32")
        return Ended(0, b"", b"")

    monkeypatch.setattr(preparing, "_run_worker", work)
    monkeypatch.setattr(Packer, "_pack_matrix", pack)
    with pytest.raises(KeyboardInterrupt):
        preparing.make(open_bundle(bundle), tmp_path, 1, None)
    (left,) = (tmp_path / "prepared").iterdir()
    with (left / "journal").open("ab") as journal:
        journal.write(b'{"file":')
    if lost:
        (left / "step.onnx.data").write_bytes(bytes((left / "step.onnx.data").stat().st_size))
    packed += ["from here on"]
    found = preparing.make(open_bundle(bundle), tmp_path, 1, None)
    again = packed[packed.index("from here on") + 1 :]
    assert (packed[0] in again) == lost and len(set(again)) == len(again)
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [found.folder.name]
    for name in found.record.files:
        (expected,) = made.glob(f"prepared/*/{name}")
        assert (found.folder / name).read_bytes() == expected.read_bytes()


def test_a_folder_that_is_open_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows it cannot be renamed."""
    (open_one := tmp_path / "prepared" / ".making-left-key-0").mkdir(parents=True)
    (open_one / "journal").touch()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "access is denied")

    monkeypatch.setattr(Path, "rename", refuse)
    fresh = begin(tmp_path, "key", 0)
    assert fresh != open_one and fresh.is_dir() and not list(fresh.iterdir())
    assert list(open_one.iterdir()) == [open_one / "journal"]


@pytest.mark.parametrize("full", [False, True], ids=["tables out of reach", "full disk"])
def test_what_is_packed_outlives_a_failure(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    real, packed, usage = Packer._pack_matrix, list[str](), shutil.disk_usage(tmp_path)

    def pack(packer: Packer, graph: Graph, *rest: Any) -> None:
        if len(packed) == 5 and full:
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
            raise OSError(errno.ENOSPC, "no space")
        packed.extend(graph.outputs)
        real(packer, graph, *rest)

    def measure(*_: object) -> None:
        raise RowReadError("no way to the tables")

    def work(opened: Bundle, folder: Path, *_: object) -> Ended:
        try:
            prepare_worker.make(opened, folder, 1, "fp32")
        except (RowReadError, OSError) as error:
            return Ended(1, str(error).encode(), b"")
        return Ended(0, b"", b"")

    monkeypatch.setattr(preparing, "_run_worker", work)
    monkeypatch.setattr(Packer, "_pack_matrix", pack)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_worker, "prefill_divergence", measure)
        with pytest.raises(
            BackendError, match=r"cannot be prepared: .*no (space|way to the tables)"
        ):
            preparing.make(open_bundle(bundle), tmp_path, 1, None)
    left, packed = list((tmp_path / "prepared").iterdir()), []
    assert bool(left) != full
    if left:
        preparing.make(open_bundle(bundle), tmp_path, 1, None)
        assert packed == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_killed_worker_leaves_what_it_packed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int) -> None:
        folder = tmp_path / "prepared"
        while not any(path.stat().st_size for path in folder.glob(".making-*/journal")):
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)

    real = subprocess.Popen

    def start(*command: Any, **options: Any) -> Any:
        worker = real(*command, **options)
        threading.Thread(target=kill, args=(worker.pid,)).start()
        return worker

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(BackendError, match=r"died of SIGKILL; another attempt goes on from there"):
        preparing.make(open_bundle(bundle), tmp_path, 1)
    (left,) = tmp_path.glob("prepared/.making-left-*")
    assert (left / "journal").read_bytes()


def test_a_graph_that_was_damaged_unnoticed(bundle: Path, own: Path) -> None:
    (graph,) = own.glob("prepared/*/step.onnx")
    seen, data = graph.stat(), graph.read_bytes()
    graph.write_bytes(bytes(255 - byte for byte in data))
    os.utime(graph, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    with (
        pytest.raises(BackendError, match=r"step\.onnx: .*; delete its folder, and the next load"),
        stem_edge.load(bundle, cache_dir=own, threads=1),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "missing", "record", "stranger"])
def test_a_damaged_graph_is_prepared_again(bundle: Path, own: Path, damage: str) -> None:
    (folder,) = (own / "prepared").iterdir()
    data = folder / "step.onnx.data"
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    if damage == "missing":
        data.unlink()
    if damage == "record":
        (folder / RECORD).write_bytes(b"{")
    if damage == "stranger":
        record = json.loads((folder / RECORD).read_bytes())
        record["files"] = {"../../../etc/passwd": 1}
        (folder / RECORD).write_text(json.dumps(record))
    assert module.place(open_bundle(bundle), own).prepared is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with stem_edge.load(bundle, cache_dir=own, threads=1) as model:
            assert np.isfinite(model.logits(IDS)).all()
    assert module.place(open_bundle(bundle), own).prepared is not None


def test_another_backbone_onnxruntime_or_processor_has_another_folder(
    bundle: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        prepared_folder(tmp_path, open_bundle(bundle), "1.28.0"),
        prepared_folder(tmp_path, open_bundle(bundle), "1.31.1"),
        prepared_folder(tmp_path, open_bundle(tiny_bundle), "1.31.1"),
    }
    monkeypatch.setattr(
        "stem_edge.runtime.backends.onnxruntime.prepared.prepacked.cpu_digest", lambda: "another"
    )
    folders.add(prepared_folder(tmp_path, open_bundle(bundle), "1.31.1"))
    assert len(folders) == 4


def test_the_command(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["prepare", str(bundle), "--cache-dir", str(tmp_path)]
    assert main([*arguments, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "made" in out
    assert "prompts go through the faster one" in out
    assert main(arguments) == 0
    assert "there already" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["onnxruntime"]
