"""Libraries compiled to stand in for ggml."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stem_edge.ggml.library import (
    library_path,
)

LIBRARY = library_path()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="llama-cpp-python is not installed")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compiled(folder: Path, source: str) -> Path:
    """A shared library of a few lines of C."""
    path = folder / "libggml.so"
    (folder / "fake.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-o", str(path), str(folder / "fake.c")]
    subprocess.run(command, check=True, capture_output=True)
    return path


def version_source(version: str) -> str:
    return f'const char * ggml_version(void) {{ return "{version}"; }}'
