"""Child processes: how they are started."""

from __future__ import annotations

import sys

import pytest

from stem_edge.system.child import module_command, run_worker


def test_a_module_in_another_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    command = module_command("stem_edge.export.worker", "a", "b", "onnxruntime", "False")
    assert (command[0], command[1:3], command[-4:-2]) == (sys.executable, ["-P", "-c"], ["a", "b"])
    status, said = run_worker(command)
    assert status == 11
    assert b"CheckpointError: a: no such checkpoint" in said
    monkeypatch.setattr(sys, "executable", "")
    assert module_command("x")[0] == "python3"
