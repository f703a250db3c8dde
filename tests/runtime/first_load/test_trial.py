"""Trial of a bundle in another process, and what is kept of it. Crashes: faults/backbones/test_native.py."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from installed import DEMO, needs_ggml

import stem_edge
from stem_edge.bundle import keeping, prefill_check, verdicts
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import open_bundle
from stem_edge.bundle.verdicts import Verdicts
from stem_edge.errors import BackendError, BundleError, InputError
from stem_edge.files import hashing as hashes
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.first_load import trial, trial_worker
from stem_edge.runtime.first_load.trial import TrialLimits, try_first
from stem_edge.system.child import Ended

needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds memory so")


class Trials:
    """A copy of a bundle, which counts its trials."""

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
    """Record the names of files that are hashed."""
    real, seen = hashes.sha256_of, list[str]()

    def watch(path: Path, nbytes: int, progress: object) -> str:
        seen.append(path.name)
        return real(path, nbytes, lambda count: None)

    monkeypatch.setattr(keeping, "sha256_of", watch)
    return seen


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def test_the_real_worker(engine: EngineName, tiny: Path, tmp_path: Path) -> None:
    bundle = open_bundle(tiny)
    try_first(bundle, engine, tmp_path)
    verdict = Verdicts(bundle, engine, tmp_path).verdict()
    assert verdict is not None
    assert (verdict.reason, verdict.engine, verdict.bundle) == ("", engine, str(bundle.path))


def test_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = hashed(monkeypatch)
    assert [trials.count(), trials.count()] == [1, 0]
    assert len(seen) == 7


def test_a_copy_is_hashed_and_not_tried(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.count()
    seen = hashed(monkeypatch)
    copy = Path(shutil.copytree(trials.path, tmp_path / "copy"))
    assert [trials.count(copy), trials.count(copy)] == [0, 0]
    assert len(seen) == 7


def test_tables_of_another_export_are_found_at_the_first_load(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records have correct checksums; only the manifest shows whose they are."""
    trials.count()
    copy = Path(shutil.copytree(trials.path, tmp_path / "copy"))
    shard = copy / "tables.zarr/records/c/0/0"
    bundle = open_bundle(copy)
    layout = bundle.manifest.tables
    assert layout is not None
    data, size = shard.read_bytes(), layout.record_nbytes + 4
    shard.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    with pytest.raises(BundleError, match="records/c/0/0: sha256 is"):
        try_first(bundle, "onnxruntime", trials.cache)
    monkeypatch.setattr(verdicts, "HASHED_TABLES_NBYTES", 1000)  # large ones are left to verify
    try_first(bundle, "onnxruntime", trials.cache)


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux alone")
def test_a_bundle_whose_path_is_no_utf8(trials: Trials, tmp_path: Path) -> None:
    copy = tmp_path / os.fsdecode(b"m\xff")
    shutil.copytree(trials.path, copy)
    assert [trials.count(copy), trials.count(copy)] == [1, 0]


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


@pytest.mark.parametrize("what", ["cpu_digest", "version_of", "__version__"])
def test_another_processor_library_or_stem_edge(
    what: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.count()
    value = "another" if what == "__version__" else lambda *_: "another"
    monkeypatch.setattr(verdicts, what, value)
    assert [trials.count(), trials.count()] == [1, 0]


def test_a_folder_that_cannot_be_written(trials: Trials) -> None:
    trials.cache.write_text("a file")
    assert [trials.count(), trials.count()] == [1, 1]


def test_what_was_exported_here_is_not_tried(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "run_steps", None)
    with stem_edge.load(tiny_bundle, warm_start=False):
        pass


def test_without_a_trial(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_steps", None)
    monkeypatch.setattr(keeping, "sha256_of", None)
    with stem_edge.load(trials.path, cache_dir=trials.cache, warm_start=False, trial=False):
        assert not trials.cache.exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/nothing/python"], r"cannot start /nothing/python .*\(No such file.*; free some memory"),
        ([sys.executable, "-c", "1 / 0"], r"exit status 1 at .*: ZeroDivisionError.*; report this"),
        (
            [sys.executable, "-c", "import sys; sys.exit('\\x1b[2J')"],
            r"exit status 1 at it printed nothing: '\\x1b\[2J'\)",
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
        ("__doc__", BackendError),
    ],
)
def test_our_own_errors_are_passed_on_unchanged(
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


def test_what_a_user_allows_is_not_the_fault_of_a_bundle(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match=r"needed more than 200 MB .*; allow more memory, or"):
        try_first(
            open_bundle(trials.path),
            "onnxruntime",
            trials.cache,
            memory="200MB",
            command=[sys.executable, "-c", "import sys; sys.exit(12)"],
        )
    assert trials.count() == 1


def test_a_large_backbone_is_not_tried(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(trials.path)
    small = TrialLimits.of(Verdicts(bundle, "onnxruntime", trials.cache))
    monkeypatch.setattr(prefill_check, "TRIED_NBYTES", 1000)
    large = TrialLimits.of(Verdicts(bundle, "onnxruntime", trials.cache))
    assert large.memory_nbytes < small.memory_nbytes and large.cpu_seconds <= small.cpu_seconds
    assert trial_worker.measure_prefill(bundle, lambda step: None) is None


@pytest.mark.parametrize(
    ("status", "said", "kept"),
    [
        (None, "did not finish a step within 3 s (at step 2); try again on a less busy", True),
        (12, "needed more than 1 kB of memory (at step 2); do not load it unless", True),
        (-24, "took more than 5 s of processor time (at step 2); do not load it unless", True),
        (-11, "it crashed the process of its trial (SIGSEGV at step 2: odd); do not", True),
        (-31, "it crashed the process of its trial (SIGSYS at step 2: odd); do not", True),
        (
            -9,
            "may take 1 kB of memory, was killed (at step 2); free some memory, or allow",
            False,
        ),
        (-15, "its trial could not be completed (SIGTERM at step 2: odd); report", False),
        (0, "its trial could not be completed (exit status 0 at step 2: odd)", False),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_how_a_worker_may_end(
    status: int | None, said: str, kept: bool, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, seen = Ended(status, b"step 1\nstep 2\n", b"\nodd\n"), list[tuple[object, ...]]()

    def run(*given: object) -> Ended:
        seen.append(given)
        return ended

    monkeypatch.setattr(trial, "run_steps", run)
    monkeypatch.setattr(trial, "_is_limited", lambda limits: False)
    limits, bundle = TrialLimits(1000, 5, 3.0), open_bundle(trials.path)
    for _ in range(2):
        with pytest.raises(BackendError) as caught:
            try_first(bundle, "onnxruntime", trials.cache, command=["worker"], limits=limits)
        assert said in str(caught.value)
        assert str(caught.value).startswith(f"{bundle.path}: ")
    assert len(seen) == (1 if kept else 2)
    arguments = [str(trials.path.resolve()), "onnxruntime", "1000", "5"]
    assert seen[0] == (["worker", *arguments], 60.0, 3.0)
    verdict = Verdicts(bundle, "onnxruntime", trials.cache).verdict()
    assert (verdict is not None) == kept
    if verdict is not None:
        assert (verdict.until is None) == (status is not None)


def test_an_exception_of_windows_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    failed = trial._failure(Ended(0xC0000005, b"a step", b""), TrialLimits(1, 1, 1.0))
    assert "it crashed the process of its trial (exception 0xc0000005" in failed.reason
    assert failed.kept
    assert not trial._failure(Ended(3, b"a step", b""), TrialLimits(1, 1, 1.0)).kept


def test_a_worker_that_says_nothing_may_do_so_for_another_reason() -> None:
    failed = trial._failure(Ended(None, b"", b""), TrialLimits(1, 1, 1.0))
    assert failed.reason == "the process for its trial did not start within 60 s"
    assert not failed.kept and not failed.certain


def test_messages_are_cut(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [b"InputError: " + b"x" * 3000, b"x" * 300]
    monkeypatch.setattr(trial, "run_steps", lambda *_: Ended(11, b"", said[0]))
    with pytest.raises(InputError) as caught:
        try_first(open_bundle(trials.path), "onnxruntime", trials.cache)
    assert str(caught.value) == "x" * (2000 - len("InputError: "))
    assert len(trial._plain(said[1])) == 200


def test_files_are_hashed_under_a_bar(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar, and what follows it, is shown for large files only."""
    told: list[tuple[int, str, bool | None]] = []

    def bar(nbytes: int, name: str, show: bool | None) -> Any:
        told.append((nbytes, name, show))
        return nullcontext(SimpleNamespace(advance=lambda count: None))

    monkeypatch.setattr(trial, "Progress", bar)
    trials.count()
    nbytes = told[0][0]
    for most in (nbytes, nbytes - 1):
        monkeypatch.setattr(trial, "UNSEEN_NBYTES", most)
        try_first(open_bundle(trials.path), "onnxruntime", trials.cache, True)
    tried = (0, "trying it in another process, once")
    assert [each for each in told if each[:2] == tried] == [(*tried, False)]
    told.remove((*tried, False))
    assert told == [(nbytes, "checking files", show) for show in (False, False, True)]
