"""What NVIDIA's driver says of a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stem_edge.system import nvidia


@pytest.mark.skipif(os.name != "posix", reason="programs are scripts on POSIX systems")
def test_what_nvidias_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '7, 12'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvidia.nbytes_on_nvidia(7) == 12 << 20
    assert nvidia.nbytes_on_nvidia(8) is None  # in a container, processes have other numbers
    program.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia.nbytes_on_nvidia(7) is None
