"""Child processes with limits of time and memory, and reports on how they end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stem_edge.system.child import (
    module_command,
    run_child,
)

LONG = 60.0
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="no signals or limits")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


SHOW = (
    "import os, sys; print(os.environ.get('TOKENIZERS_PARALLELISM'), os.environ.get('OWN'), "
    "os.environ['OPENBLAS_NUM_THREADS'], os.environ['GGML_NO_BACKTRACE'], sys.stdin.read() == '');"
    "print('said', file=sys.stderr); sys.exit(3)"
)


def test_a_child_ends_and_what_it_said() -> None:
    ended = run_child(python(SHOW), LONG, {"OWN": "x"})
    assert (ended.status, ended.stdout.split()) == (3, [b"false", b"x", b"1", b"1", b"True"])
    assert ended.stderr.strip() == b"said"
    replaced = run_child(python(SHOW), LONG, {"TOKENIZERS_PARALLELISM": "true"})
    assert replaced.stdout.split()[0] == b"true"


@pytest.mark.slow
@needs_posix
@pytest.mark.parametrize("said", [b"", b"one\ntwo"])
def test_a_child_that_does_not_end(said: bytes) -> None:
    code = f"import os, time; os.write(1, {said!r}); os.write(2, {said!r}); time.sleep(600)"
    assert run_child(python(code), 3.0) == (None, said, said)


def test_a_module_in_another_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = module_command("stem_edge.runtime.backends.ggml.library_trial", "a", "b")
    assert (command[0], command[1:3], command[-2:]) == (sys.executable, ["-P", "-c"], ["a", "b"])
    ended = run_child(
        [
            *module_command("stem_edge.runtime.backends.ggml.library_trial"),
            str(tmp_path / "none.so"),
        ],
        LONG,
    )
    assert ended.status == 11
    assert b"none.so" in ended.stderr
    monkeypatch.setattr(sys, "executable", "")
    assert module_command("x")[0] == "python3"
