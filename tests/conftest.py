"""Shared fixtures: checkpoints, bundles, and a check that no test leaks threads or open files."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.terminal import TerminalReporter
from installed import FDS, HAS_GGML, NO_GGML, needs_ggml

import stem_edge
from stem_edge.errors import StemEdgeError
from stem_edge.export.quantization import calibration
from stem_edge.ggml.installed import installed_library
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends import options
from stem_edge.runtime.text import keeping, keeping_child

if TYPE_CHECKING:
    from hub_server import HubServer
    from tiny_exports import Exports

TEXT_CHARS = 3000


def pytest_addoption(parser: pytest.Parser) -> None:
    # Give it as --passed=FILE: before this option is known, pytest takes a FILE that exists for tests.
    known = "file of tests that have passed: they are left out, and what passes now is added"
    parser.addoption("--passed", type=Path, metavar="FILE", help=known)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file: Path | None = config.getoption("--passed")
    if file is not None and file.is_file():
        passed = set(file.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    file: Path | None = config.getoption("--passed")
    if file is not None and not hasattr(config, "workerinput"):  # which processes of xdist have
        reports = terminalreporter.stats.get("passed", [])
        with file.open("a", encoding="utf-8") as out:
            out.writelines(f"{report.nodeid}\n" for report in reports)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections, of which tests ask for many.

    With torch and transformers imported, each would take half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cache folder of models that several tests share."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        _use_cache(patch, folder)
        yield folder / "stem-edge" if sys.platform == "linux" else folder


@pytest.fixture(scope="session", autouse=True)
def nothing_is_synced() -> Iterator[None]:
    """Skip real syncs of this process: each takes milliseconds, and no test loses power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Load with one thread where a test names no other number: each core has a process of tests.

    More of them would wait for each other, because threads of engines spin: a third of all time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "usable_cpus", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_child_keeps_a_tokenizer() -> Iterator[None]:
    """Write tokenizer cache files in this process: a child takes 0.4 s, in each test that loads.

    Commands that tests start have children, as they do elsewhere.
    """

    def keep(path: Path, vocab_size: int | None, kept: Path, limit: int | None) -> None:
        with suppress(StemEdgeError, OSError):  # which the load finds, too
            keeping.keep(kept, *keeping.read_checked(path, vocab_size, limit), limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping_child, "keep_by_child", keep)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let exports in this process take the end of the text that is shipped, which is soon read."""
    text = calibration.SHIPPED.read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("text") / calibration.SHIPPED.name
    path.write_text(text[-TEXT_CHARS:], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SHIPPED", path)
        yield


@pytest.fixture(scope="session")
def cache_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of cache folders to be made.

    `mktemp` reads the names of all folders that it ever made, for each new one: 6 ms in the end.
    """
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_cache_folder(cache_folders: Iterator[Path], session_cache: Path) -> Iterator[Path]:
    """Give each test, and the commands it starts, its own cache folder."""
    (folder := next(cache_folders)).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        _use_cache(patch, folder)
        yield folder


def _use_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        patch.setenv(name, str(folder))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads of ours or open files of a bundle behind."""
    # Compare with the state before, because fixtures of a module may hold files open.
    before, threads_before = _open_files(), _our_threads()
    yield
    deadline = time.monotonic() + 2
    while left := [*(_our_threads() - threads_before), *(_open_files() - before)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        gc.collect()  # only when needed, because with torch it takes a tenth of a second
        time.sleep(0.01)


def _our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("stem-edge")}


def _open_files() -> set[str]:
    """Open files of bundles; none where it is not Linux."""
    if not FDS.is_dir():
        return set()
    targets = set()
    for link in os.listdir(FDS):  # noqa: PTH208
        try:
            target = os.readlink(FDS / link)  # noqa: PTH115
        except OSError:  # the descriptor that lists the folder is closed by now
            continue
        weights = (".onnx", ".onnx.data", "prefill.data", ".gguf")
        if "tables.zarr" in target or target.endswith(weights):
            targets.add(f"{link} {target}")
    return targets


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with 300 tokens, 3 layers, and tables in layers 1 and 2."""
    from make_checkpoint import Shape, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", Shape())


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_checkpoint` with an fp32 backbone and int8 tables. Do not change it."""
    out = tmp_path_factory.mktemp("bundle") / "tiny"
    stem_edge.export_bundle(tiny_checkpoint, out, type="fp32", rows="int8")
    return out


@pytest.fixture(scope="session")
def dense_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 bundle of a model without tables. Do not change it."""
    from make_checkpoint import Shape, write_checkpoint

    folder = tmp_path_factory.mktemp("dense")
    write_checkpoint(folder / "checkpoint", Shape(stem_layers=()))
    stem_edge.export_bundle(folder / "checkpoint", folder / "bundle", type="fp32")
    return folder / "bundle"


@pytest.fixture(scope="session")
def ggml() -> Ggml:
    """ggml's functions."""
    if not HAS_GGML:
        pytest.skip(NO_GGML)
    return Ggml(installed_library())


@pytest.fixture(scope="session")
def tiny_gguf(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ggml bundle of `tiny_checkpoint` with f32 weights and fp32 tables. Do not change it."""
    if not HAS_GGML:
        pytest.skip(NO_GGML)
    out = tmp_path_factory.mktemp("bundle") / "gguf"
    stem_edge.export_bundle(tiny_checkpoint, out, engine="ggml", type="f32", rows="fp32")
    return out


@pytest.fixture(params=["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def engine(request: pytest.FixtureRequest) -> EngineName:
    """Each engine in turn."""
    name: EngineName = request.param
    return name


@pytest.fixture
def tiny_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bundle`, to be damaged."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "model"))


@pytest.fixture
def tiny(engine: EngineName, request: pytest.FixtureRequest) -> Path:
    """The bundle of `tiny_checkpoint` for the current engine. Do not change it."""
    found: Path = request.getfixturevalue("tiny_bundle" if engine == "onnxruntime" else "tiny_gguf")
    return found


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Exports of every kind that take a twentieth of a second. Do not change them."""
    from tiny_exports import tiny_exports

    return tiny_exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Use one thread in torch, because with small models threads mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A model hub of our own, and an empty cache, for this process and those that it starts."""
    from hub_server import HubServer, impatient
    from huggingface_hub import constants

    home = tmp_path / "huggingface"
    for name, value in (
        ("HF_HOME", str(home)),
        ("HF_TOKEN", "hf_of_tests"),
        ("HF_HUB_DISABLE_XET", "1"),  # which is spoken with other servers
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    impatient(monkeypatch)
    with HubServer().running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
