"""Prepared backbones: the same logits, made only once, and loading without them."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import SIZES as MODEL_SIZES
from architectures import write
from every_kind import GEMMA_3N, checkpoint_of
from formats import export_as, format_with
from loading import load_fixed
from prompt_graph import load_with

import stem_edge
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.commands.main import main
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.onnxruntime import loaded as backend_ort
from stem_edge.runtime.backends.onnxruntime import prepared
from stem_edge.runtime.backends.onnxruntime.prepared import packing, preparing
from stem_edge.runtime.backends.onnxruntime.prepared import prepack_worker as prepare_worker
from stem_edge.runtime.backends.onnxruntime.prepared import prepacked as module
from stem_edge.runtime.backends.onnxruntime.prepared.packing import OtherProductsError, Packer
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    RECORD,
    find_prepared,
    prepared_folder,
    read_prepared,
)
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, open_session

IDS = [256, *b"twelve tokens or so"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, prefill_graph=True)
    return out


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "LEAST_NBYTES", 0)


@contextmanager
def unprepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let loads find this backbone too small to be prepared."""
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "LEAST_NBYTES", 1 << 40)
        yield


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
    with unprepared(monkeypatch), load_with(bundle, prefill=prefill) as model:
        expected = model.logits(IDS)
    seen, given_back = sources(monkeypatch), list[tuple[int, dict[Path, int]]]()
    monkeypatch.setattr(
        module, "give_back_mapped", lambda files: given_back.append((len(seen), files))
    )
    with load_with(bundle, cache_dir=made, prefill=prefill) as model:
        assert np.array_equal(model.logits(IDS), expected)
    from_cache = {one.name for one in seen if isinstance(one, Path) and one.is_relative_to(made)}
    assert from_cache == {"step.onnx", *(("prefill.onnx", "head.onnx") if prefill else ())}
    (folder,) = folders(made)
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
    name: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = checkpoint_of(name, tmp_path / "checkpoint"), tmp_path / "bundle"
    options: dict[str, Any] = {"type": backbone, "prefill_graph": False}
    stem_edge.export_bundle(checkpoint, out, **options)
    found = list[Any]()
    with load_fixed(out, threads=1, cache_dir=tmp_path) as model:
        found.append(model.logits([7 * n % 50 for n in range(20)]))
    with unprepared(monkeypatch), load_fixed(out, threads=1) as model:
        found.append(model.logits([7 * n % 50 for n in range(20)]))
    assert np.array_equal(*found)


def test_the_first_load_makes_it_and_the_second_uses_it(bundle: Path, tmp_path: Path) -> None:
    with load_fixed(bundle, cache_dir=tmp_path, threads=1):
        pass
    (folder,) = folders(tmp_path)
    record = read_prepared(folder)
    assert record is not None
    assert record.bundle == str(bundle.resolve())
    assert record.steps is not None and list(record.steps.times) == [1, 2, 4, 8]
    costs = record.steps if record.steps.same_bits else None
    before = (folder / RECORD).stat().st_mtime_ns
    with load_fixed(bundle, cache_dir=tmp_path, threads=1) as model:
        assert (model.stepping.speculation and model.stepping.speculation.costs) == costs
    assert (folder / RECORD).stat().st_mtime_ns == before
    with load_fixed(bundle, cache_dir=tmp_path, threads=1, exact=True) as model:
        assert (model.stepping.speculation is not None) == (costs is not None)
        assert model.stepping.costs == record.steps


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86")
@pytest.mark.parametrize("block", [32, 64])
def test_tokens_keep_their_bits_in_any_step(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where kernels round an unpaired row of 4-bit products differently, as in blocks of 64."""
    monkeypatch.setattr(prepare_worker, "LAYER_NBYTES", 0)
    config = ModelConfig(
        **(MODEL_SIZES | {"dim": 128, "d_ff": 128, "n_layers": 1, "stem_layers": ()})
    )
    checkpoint, *_ = write(tmp_path / "checkpoint", config)
    format = format_with("int4", block_size=block)
    bundle = export_as(checkpoint, tmp_path / "bundle", format, prefill_graph=False, max_kl=99.0)
    (tmp_path / "made").mkdir()
    prepare_worker.make(bundle, tmp_path / "made", 1, "fp32")
    record = read_prepared(tmp_path / "made")
    assert record is not None and record.rows in ("any", "even")
    assert record.steps is not None and record.steps.same_bits and record.steps.same_in_batches


def test_a_small_backbone_is_not_prepared(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "LEAST_NBYTES", 1 << 30)
    with load_fixed(bundle, cache_dir=tmp_path, warm_start=False):
        pass
    assert not (tmp_path / "prepared").exists()


def folders(cache_dir: Path) -> list[Path]:
    """Return the folders of prepared backbones, unfinished ones too."""
    return [path for path in (cache_dir / "prepared").iterdir() if path.is_dir()]


def refused(bundle: Path, cache_dir: Path, message: str) -> None:
    """Check that a load works and warns why it is not prepacked."""
    with (
        pytest.warns(preparing.NotPrepared, match=message),
        load_fixed(bundle, cache_dir=cache_dir, threads=1) as model,
    ):
        assert np.isfinite(model.logits(IDS)).all()


def test_a_full_disk(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(bundle, tmp_path, "takes [0-9,]+ bytes, 1,000 are free")
    assert not folders(tmp_path)


@pytest.mark.slow
def test_saved_graphs_that_compute_something_else_are_refused_once(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    tries = list[Path]()

    def refuse(packer: Packer, name: str, graph: object) -> None:
        raise OtherProductsError(name)

    def work(opened: Bundle, folder: Path, *_: object) -> None:
        tries.append(folder)
        prepare_worker.make(opened, folder, 1, "fp32")

    monkeypatch.setattr(preparing, "_run_worker", work)
    monkeypatch.setattr(Packer, "pack", refuse)
    refused(bundle, tmp_path, "computes other logits from packed weights on this processor")
    with warnings.catch_warnings(), load_fixed(bundle, cache_dir=tmp_path) as model:
        warnings.simplefilter("error")
        assert len(tries) == 1
        assert model.plan.weights == stem_edge.memory_plan(bundle, cache_dir=tmp_path).weights
    assert main(["prepare", str(bundle), "--cache-dir", str(tmp_path)]) == 1
    assert "computes other logits" in capsys.readouterr().err and len(tries) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space")])
def test_a_failure_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(packing, "GROUP_NBYTES", 10_000)  # several groups
    real, packed = Packer._pack_group, list[str]()

    def pack(packer: Packer, graph: Graph, *rest: Any) -> None:
        packed.append(next(iter(graph.outputs)))
        if len(packed) == 3:
            raise error
        real(packer, graph, *rest)

    def work(opened: Bundle, folder: Path, *_: object) -> None:
        prepare_worker.make(opened, folder, 1, "fp32")

    monkeypatch.setattr(preparing, "_run_worker", work)
    monkeypatch.setattr(Packer, "_pack_group", pack)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else BackendError):
        preparing.make(open_bundle(bundle), tmp_path, 1)
    assert not folders(tmp_path)
    assert preparing.make(open_bundle(bundle), tmp_path, 1).record.files


def test_what_a_killed_attempt_left_goes(bundle: Path, tmp_path: Path, made: Path) -> None:
    (done,) = folders(made)
    left = tmp_path / "prepared" / f".making-999999999-{done.name}-0123abcd"
    left.mkdir(parents=True)
    (left / "step.onnx.data").write_bytes(bytes(1000))
    found = preparing.make(open_bundle(bundle), tmp_path, 1)
    assert folders(tmp_path) == [found.folder]


def test_several_first_loads_prepare_once(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = preparing._run_worker, list[Path]()

    def count(opened: Bundle, folder: Path, *rest: Any) -> None:
        runs.append(folder)
        real(opened, folder, *rest)

    monkeypatch.setattr(preparing, "_run_worker", count)
    with ThreadPoolExecutor(3) as threads:
        make = partial(preparing.make, open_bundle(bundle), tmp_path, 1, False)
        found = {one.folder for one in threads.map(lambda _: make(), range(3))}
    assert len(runs) == 1 and found == {*folders(tmp_path)}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "missing", "record", "stranger"])
def test_a_damaged_graph_is_prepared_again(bundle: Path, own: Path, damage: str) -> None:
    (folder,) = folders(own)
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
    assert find_prepared(open_bundle(bundle), own, "fp32") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with load_fixed(bundle, cache_dir=own, threads=1) as model:
            assert np.isfinite(model.logits(IDS)).all()
    assert find_prepared(open_bundle(bundle), own, "fp32") is not None


def test_another_backbone_onnxruntime_or_processor_has_another_folder(
    bundle: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        prepared_folder(tmp_path, open_bundle(bundle), "1.28.0", "fp32"),
        prepared_folder(tmp_path, open_bundle(bundle), "1.31.1", "fp32"),
        prepared_folder(tmp_path, open_bundle(tiny_bundle), "1.31.1", "fp32"),
    }
    monkeypatch.setattr(
        "stem_edge.runtime.backends.onnxruntime.prepared.prepacked.cpu_digest", lambda: "another"
    )
    folders.add(prepared_folder(tmp_path, open_bundle(bundle), "1.31.1", "fp32"))
    assert len(folders) == 4


def test_the_command(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["prepare", str(bundle), "--cache-dir", str(tmp_path)]
    assert main([*arguments, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "made" in out
    assert main(arguments) == 0
    assert "there already" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["onnxruntime"]
