"""When a bundle is tried in another process, and what is kept of that. Crashes: faults/test_b_native."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from conftest import DEMO

import stem_edge
from stem_edge import verdicts
from stem_edge.bundle import TOKENIZER, EngineName, open_bundle
from stem_edge.child import module_command, run_child
from stem_edge.errors import BackendError, BundleError, InputError
from stem_edge.ggml import library_path
from stem_edge.runtime import trial
from stem_edge.runtime.trial import try_first
from stem_edge.verdicts import Records

needs_ggml = pytest.mark.skipif(library_path() is None, reason="llama-cpp-python is not installed")
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds memory so")


class Trials:
    """A copy of a bundle, and how often it is tried."""

    def __init__(self, folder: Path) -> None:
        self.path, self.cache = Path(shutil.copytree(DEMO, folder / "model")), folder / "cache"
        self._mark = folder / "mark"

    def count(self, path: Path | None = None) -> int:
        code = f"open({str(self._mark)!r}, 'a').write('x'); print('done')"
        self._mark.write_text("")
        try_first(
            open_bundle(path or self.path),
            "onnxruntime",
            self.cache,
            command=[sys.executable, "-c", code],
        )
        return len(self._mark.read_text())


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    return Trials(tmp_path)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files, as they are hashed."""
    real, seen = verdicts._sha256, list[str]()

    def watch(path: Path, progress: object) -> str:
        seen.append(path.name)
        return real(path, lambda nbytes: None)

    monkeypatch.setattr(verdicts, "_sha256", watch)
    return seen


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def test_the_real_worker(
    engine: EngineName, tiny_bundle: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    bundle = open_bundle(tiny_gguf if engine == "ggml" else tiny_bundle)
    try_first(bundle, engine, tmp_path)
    verdict = Records(bundle, engine, tmp_path).verdict()
    assert verdict is not None
    assert (verdict.reason, verdict.engine, verdict.bundle) == ("", engine, str(bundle.path))


def test_a_dense_bundle(tmp_path: Path) -> None:
    from make_checkpoint import Shape, write_checkpoint

    source = write_checkpoint(tmp_path / "checkpoint", Shape(stem_layers=()))
    bundle = stem_edge.export_bundle(source, tmp_path / "dense", backbone="fp32")
    try_first(bundle, "onnxruntime", tmp_path)


def test_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = hashed(monkeypatch)
    assert [trials.count(), trials.count()] == [1, 0]
    assert len(seen) == len(set(seen)) == 9


def test_what_is_known_costs_next_to_nothing(trials: Trials) -> None:
    trials.count()
    bundle, taken = open_bundle(trials.path), []
    for _ in range(5):
        started = time.perf_counter()
        try_first(bundle, "onnxruntime", trials.cache)
        taken.append(time.perf_counter() - started)
    assert min(taken) < 0.05  # about 0.001


def test_a_copy_is_hashed_and_not_tried(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.count()
    seen = hashed(monkeypatch)
    copy = Path(shutil.copytree(trials.path, tmp_path / "copy"))
    assert [trials.count(copy), trials.count(copy)] == [0, 0]
    assert len(seen) == 9


def test_a_link_to_the_bundle_is_the_same_place(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.count()
    seen = hashed(monkeypatch)
    (tmp_path / "link").symlink_to(trials.path)
    assert trials.count(tmp_path / "link") == 0
    assert not seen


def test_a_file_that_was_written_to_is_hashed_again(trials: Trials) -> None:
    trials.count()
    path = trials.path / TOKENIZER
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + b" ")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as some tools that copy do
    with pytest.raises(BundleError, match=r"tokenizer\.json: sha256 is \w+, expected \w+; .*copy"):
        trials.count()
    path.write_bytes(data)
    assert trials.count() == 0


def test_other_contents_are_tried(trials: Trials) -> None:
    trials.count()
    manifest = trials.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    assert [trials.count(), trials.count()] == [1, 0]


@pytest.mark.parametrize("what", ["cpu_digest", "_version", "__version__"])
def test_another_processor_library_or_stem_edge(
    what: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.count()
    value = "another" if what == "__version__" else lambda *_: "another"
    monkeypatch.setattr(verdicts, what, value)
    assert [trials.count(), trials.count()] == [1, 0]


@pytest.mark.parametrize("kind", ["trials", "places"])
@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 0}', b"[" * 60000, bytes(1 << 17)])
def test_damaged_records_do_not_count(damage: bytes, kind: str, trials: Trials) -> None:
    trials.count()
    (kept,) = (trials.cache / kind).iterdir()
    kept.write_bytes(damage)
    assert [trials.count(), trials.count()] == [int(kind == "trials"), 0]


def test_a_folder_that_cannot_be_written(trials: Trials) -> None:
    trials.cache.write_text("a file")
    assert [trials.count(), trials.count()] == [1, 1]


def test_what_was_exported_here_is_not_tried(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "run_child", None)
    with stem_edge.load(tiny_bundle, warm_start=False):
        pass


def test_without_a_trial(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_child", None)
    monkeypatch.setattr(verdicts, "_sha256", None)
    with stem_edge.load(trials.path, cache_dir=trials.cache, warm_start=False, trial=False):
        assert not trials.cache.exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/nothing/python"], r"cannot start /nothing/python .*\(No such file.*; free some memory"),
        ([sys.executable, "-c", "1 / 0"], r"exit status 1 at .*: ZeroDivisionError.*; report this"),
        ([sys.executable, "-c", "print('not quite')"], r"exit status 0 at not quite: .*; report"),
        (
            [sys.executable, "-c", "import sys; sys.exit('\\x1b[2J')"],
            r"exit status 1 at it said nothing: '\\x1b\[2J'\)",
        ),
    ],
)
def test_a_worker_that_cannot_work(command: list[str], said: str, trials: Trials) -> None:
    with pytest.raises(BackendError, match=said):
        try_first(open_bundle(trials.path), "onnxruntime", trials.cache, command=command)
    assert not (trials.cache / "trials").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BundleError", BundleError),
        ("InputError", InputError),
        ("NoSuchError", BackendError),
        ("annotations", BackendError),
    ],
)
def test_an_error_of_ours_comes_as_it_is(
    name: str, expected: type[Exception], trials: Trials
) -> None:
    code = f"import sys; print('{name}: x: is wrong; copy it', file=sys.stderr); sys.exit(11)"
    command, bundle = [sys.executable, "-c", code], open_bundle(trials.path)
    with pytest.raises(expected, match=r"^x: is wrong; copy it$") as caught:
        try_first(bundle, "onnxruntime", trials.cache, command=command)
    assert type(caught.value) is expected
    assert not (trials.cache / "trials").exists()


@needs_limits
def test_a_limit_of_our_own_is_not_the_fault_of_a_bundle(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    limit = (1 << 30, resource.RLIM_INFINITY)
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda number: limit)
        with pytest.raises(BackendError, match=r"needed more than .* of memory"):
            try_first(
                open_bundle(trials.path),
                "onnxruntime",
                trials.cache,
                command=[sys.executable, "-c", "import sys; sys.exit(12)"],
            )
    assert trials.count() == 1


def test_a_module_in_another_interpreter(tmp_path: Path) -> None:
    ended = run_child([*module_command("stem_edge.ggml_trial"), str(tmp_path / "none.so")], 60)
    assert ended.status == 11
    assert b"none.so" in ended.stderr


@needs_limits
def test_the_limits_of_a_child() -> None:
    code = (
        "from stem_edge.child import limit_this_process; limit_this_process(1 << 28, 60)\n"
        "try: bytearray(1 << 29)\nexcept MemoryError: print('no')"
    )
    assert run_child([sys.executable, "-c", code], 60).stdout == b"no\n"
