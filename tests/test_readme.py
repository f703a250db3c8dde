"""README's commands and Python run as they stand there, and its file tree is the tree."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import needs_ggml

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# Commands that install, train for minutes or need files of the reader's.
NOT_RUN = (
    "CMAKE_ARGS=",
    "make ",
    "pip ",
    "git ",
    "python tools/",
    "mutmut ",
    "stem-edge export build/",
    "stem-edge bench build/",
    "stem-edge measure build/",
    "stem-edge eval exact",
    "stem-edge inspect stem_edge/",
)

# Providers that are not everywhere.
ELSEWHERE = ("--providers cuda", "--providers webgpu")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def workplace(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README's reader has: a checkpoint and a text to continue."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "checkpoint").symlink_to(tiny_checkpoint)
    (folder / "prompt.txt").write_text("Once upon a time")
    return folder


@needs_ggml
@pytest.mark.slow
def test_commands_run_in_their_order_and_then_python(workplace: Path) -> None:
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    here = [line for line in commands() if not any(name in line for name in ELSEWHERE)]
    run = [line for line in here if not line.startswith(NOT_RUN)]
    assert len(run) >= 5
    for line in [*run, *(shlex.join([sys.executable, "-c", one]) for one in blocks("python"))]:
        done = subprocess.run(
            line, shell=True, cwd=workplace, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_commands_that_are_not_run_name_files_that_exist() -> None:
    for line in commands():
        if line.startswith("python tools/"):
            assert (ROOT / shlex.split(line)[1]).is_file(), line
