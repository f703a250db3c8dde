"""Catalogue B9, B10, R7: files that make native code crash, hang or take too much memory.

What loads them first is a process of its own. Here it is either a small one that does what a library
would do, always in the same way; or the real one without the checks that refuse such files before.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from contract import command_refused, refused
from forging import sealed

import stem_edge
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.verdicts import Verdicts
from stem_edge.errors import BackendError
from stem_edge.runtime.first_load import trial
from stem_edge.runtime.first_load.trial import TrialLimits, try_first

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="no signals")
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds memory so")

STEP = "texts through tokenizer.json"
SAY = f"print({STEP!r}, flush=True)"
GOOD = "print('done')"
LONG = 120.0
QUICK = TrialLimits(1 << 30, 60, 60.0)
# The worker without the checks that keep hostile files from native code.
UNCHECKED = """
import sys
from stem_edge.runtime.first_load import trial_worker
from stem_edge.text import tokenizer_gate as text
from stem_edge.text.checked_tokenizer import CheckedTokenizer, TokenizerMemory
read = lambda path, *_: CheckedTokenizer(path.read_bytes(), 1, 1, (), False, TokenizerMemory(0, 0), 1)
text.check_tokenizer = read
sys.exit(trial_worker.main())"""


def child(code: str) -> list[str]:
    """A command that runs Python code instead of the worker."""
    return [sys.executable, "-c", code]


def dies(number: int) -> list[str]:
    """A worker that a signal ends where it uses the tokenizer."""
    return child(f"import os; {SAY}; os.kill(os.getpid(), {number})")


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


def kept(cache: Path) -> list[Path]:
    return list(cache.glob("trials/*"))


@needs_signals
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_b9_a_crash_at_load_is_an_error_and_is_remembered(
    name: str, bundle: Bundle, tmp_path: Path
) -> None:
    number = getattr(signal, name)

    def load(code: list[str]) -> None:
        try_first(bundle, "onnxruntime", tmp_path, command=code)

    said = (bundle.path, name, STEP, f"stem-edge verify {bundle.path}")
    first = refused(lambda: load(dies(number)), BackendError, *said, kept=[bundle.path])
    # From now on it is refused without another trial, whatever the trial would say.
    assert refused(lambda: load(child(GOOD)), BackendError, *said) == first
    try_first(bundle, "onnxruntime", tmp_path, anew=True, command=child(GOOD))
    load(dies(number))  # starts nothing because the good verdict counts


@needs_signals
def test_b9_load_and_generate_refuse_it_and_others_load(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = sealed(tiny_bundle, tmp_path / "hostile", {"tokenizer_config.json": b"{ }"})
    with monkeypatch.context() as patch:
        patch.setattr(trial, "module_command", lambda name: dies(signal.SIGSEGV))
        refused(lambda: stem_edge.load(hostile), BackendError, hostile, "SIGSEGV", STEP)
    command_refused(capsys, ["generate", hostile, "-p", "a"], hostile, "SIGSEGV", STEP)
    with stem_edge.load(tiny_bundle, warm_start=False) as model:
        assert model.generate_text("a", max_new_tokens=2) is not None
    with stem_edge.load(hostile, warm_start=False, trial=False):
        pass  # the user may override the verdict


@needs_signals
def test_b9_verify_says_so_too(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trial, "module_command", lambda name: dies(signal.SIGSEGV))
    message = command_refused(
        capsys, ["verify", tiny_bundle, "--cache-dir", tmp_path], tiny_bundle, "SIGSEGV", STEP
    )
    assert "not safe to load" in message


def test_b9_nothing_is_imported_from_the_folder_where_it_starts(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder may be a bundle with modules in it."""
    for name in ("numpy", "json", "onnxruntime", "stem_edge", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    try_first(bundle, "onnxruntime", tmp_path / "cache")
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_b10_a_hang_at_load_ends_and_is_remembered_for_an_hour(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict expires, because the machine may only have been busy."""
    hangs = child(f"import time; {SAY}; time.sleep(600)")

    def load(command: list[str]) -> None:
        limits = QUICK._replace(step_seconds=1.0)
        try_first(bundle, "onnxruntime", tmp_path, command=command, limits=limits)

    said = (
        "did not finish a step within 1 s",
        STEP,
        f"in an hour, or at once with: stem-edge verify {bundle.path}",
    )
    first = refused(lambda: load(hangs), BackendError, bundle.path, *said)
    assert refused(lambda: load(child(GOOD)), BackendError, *said) == first  # without another trial
    try_first(bundle, "onnxruntime", tmp_path, anew=True, command=child(GOOD))
    load(hangs)  # because the good verdict counts
    for path in kept(tmp_path):
        path.unlink()
    refused(lambda: load(hangs), BackendError, *said)
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    load(child(GOOD))


def test_b10_a_small_file_is_refused_within_ten_seconds(bundle: Bundle, tmp_path: Path) -> None:
    limits = TrialLimits.of(Verdicts(bundle, "onnxruntime", tmp_path))
    assert limits.cpu_seconds + 1 < limits.step_seconds < 9


@pytest.mark.slow
def test_b10_a_worker_that_does_not_start_says_nothing_about_the_bundle(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "START_SECONDS", 1.0)

    def load() -> None:
        hangs = child("import time; time.sleep(600)")
        try_first(bundle, "onnxruntime", tmp_path, command=hangs, limits=QUICK)

    refused(load, BackendError, bundle.path, "did not start within 1 s", "try again")
    assert not kept(tmp_path)


@pytest.mark.slow
@needs_limits
def test_b10_a_loop_at_load_is_remembered(bundle: Bundle, tmp_path: Path) -> None:
    loops = child(
        "from stem_edge.system.child import limit_this_process; import sys; "
        f"limit_this_process(int(sys.argv[3]), int(sys.argv[4])); {SAY}\nwhile True: pass"
    )

    def load(command: list[str]) -> None:
        limits = QUICK._replace(cpu_seconds=0)
        try_first(bundle, "onnxruntime", tmp_path, command=command, limits=limits)

    refused(lambda: load(loops), BackendError, "took more than 0 s of processor time", STEP)
    refused(lambda: load(child(GOOD)), BackendError, "processor time", STEP)


def patient(bundle: Bundle, cache: Path) -> TrialLimits:
    """Limits of the bundle with more time, because other tests keep the machine busy."""
    return TrialLimits.of(Verdicts(bundle, "onnxruntime", cache))._replace(step_seconds=LONG)


def grows(told: dict[str, object]) -> None:
    """T5: a text becomes a thousand million times as long."""
    pattern, content = {"String": "a"}, "a" * 10
    step = {"type": "Replace", "pattern": pattern, "content": content}
    told["normalizer"] = {"type": "Sequence", "normalizers": [step] * 10}


def pads(told: dict[str, object]) -> None:
    """T6: every text is as long as a disk."""
    told["padding"] = {
        "strategy": {"Fixed": 10**11},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }


@pytest.mark.slow
@needs_limits
@pytest.mark.parametrize("change", [grows, pads])
def test_r7_an_abort_for_want_of_memory_in_native_code(
    change: object, tiny_bundle: Path, tmp_path: Path
) -> None:
    told = json.loads((tiny_bundle / TOKENIZER).read_text("utf-8"))
    assert callable(change)
    change(told)
    files = {TOKENIZER: json.dumps(told).encode()}
    hostile = open_bundle(sealed(tiny_bundle, tmp_path / "hostile", files))

    def load(code: str) -> None:
        limits = patient(hostile, tmp_path)
        try_first(hostile, "onnxruntime", tmp_path, command=child(code), limits=limits)

    naming = (hostile.path, "SIGABRT", TOKENIZER)
    refused(lambda: load(UNCHECKED), BackendError, *naming, seconds=LONG)
    refused(lambda: load(GOOD), BackendError, *naming)


@needs_signals
def test_r7_a_process_that_the_system_killed_says_nothing_about_the_bundle(
    bundle: Bundle, tmp_path: Path
) -> None:
    def load() -> None:
        try_first(bundle, "onnxruntime", tmp_path, command=dies(signal.SIGKILL))

    refused(load, BackendError, bundle.path, "was killed", STEP, "free some memory")
    assert not kept(tmp_path)
