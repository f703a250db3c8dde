"""Programs of tools/ start from any folder and explain themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processors
import pytest
from installed import ROOT

PROGRAMS = sorted(
    path for path in (ROOT / "tools").rglob("*.py") if '__name__ == "__main__"' in path.read_text()
)
NO_HELP = {"demo_logits.py"}  # because its only argument is a folder

HELP_OF_ALL = """
import runpy, sys
for program in sys.argv[1:]:
    sys.argv = [program, "--help"]
    sys.path[0] = program.rpartition("/")[0]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, program
"""


def run(program: Path, folder: Path, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_programs_explain_themselves(tmp_path: Path) -> None:
    """One process runs them all, because each would import torch."""
    pytest.importorskip("torch")
    programs = [path for path in PROGRAMS if path.name not in NO_HELP]
    (tmp_path / "all.py").write_text(HELP_OF_ALL)
    printed = run(tmp_path / "all.py", tmp_path, *programs)
    assert printed.count("usage: ") == len(programs) > 5


def test_other_processors_run_tests_that_are_there() -> None:
    for path in processors.FILES:
        assert (ROOT / "tests" / path).exists(), path
    assert "numpy" in " ".join(processors.requirements())
