"""Running tests on other processors, as far as any machine can check it."""

from __future__ import annotations

import shutil
import sys

import processors
import pytest
from processors import FILES, PROCESSORS, ROOT, UnavailableError, requirements, run

SATURATES = "from stem_edge.runtime.backends.onnxruntime.providers.session import products_saturate as p; exit(not p())"


def test_the_tests_that_are_run_there_exist() -> None:
    assert all((ROOT / "tests" / name).exists() for name in FILES)


def test_what_is_installed_there_is_the_projects_own_list_without_torch() -> None:
    names = requirements()
    assert "numpy>=1.26" in names
    for own in ("pytest", "onnx>", "onnxruntime"):
        assert any(name.startswith(own) for name in names)
    assert not any(name.startswith("torch") for name in names)


def test_an_unknown_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["processors.py", "z80", "--", "-c", "1"])
    with pytest.raises(SystemExit, match="2"):
        processors.main()
    assert (
        f"unknown processor z80; expected some of {', '.join(PROCESSORS)}"
        in capsys.readouterr().err
    )


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["processors.py", "arm64", "--", "-c", "1"])
    assert processors.main() == 2
    said = capsys.readouterr().out
    assert "apt-get install mmdebstrap util-linux gcc qemu-user-static" in said
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnavailableError, match="Linux and root"):
        run("arm64", ["-c", "1"])


def test_features_are_hidden_where_the_processor_can() -> None:
    if "cpuid_fault" not in processors.cpu_words() or not shutil.which("cc"):
        pytest.skip("this processor cannot hide its features, or there is no compiler")
    assert run("avx2", ["-c", SATURATES]) == 0


def test_a_processor_without_vnni_is_avx2_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "cpu_words", lambda: {"avx2", "cpuid_fault"})
    monkeypatch.setattr(processors, "run_hidden", None)
    assert run("avx2", ["-c", "exit(3)"]) == 3
