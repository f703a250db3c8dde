"""Compile shared libraries that stand in for ggml."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stem_edge.ggml.installed import library_path

LIBRARY = library_path()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="llama-cpp-python is not installed")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compiled(folder: Path, source: str) -> Path:
    """Compile C source into a shared library and return its path."""
    path = folder / "libggml.so"
    (folder / "fake.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-o", str(path), str(folder / "fake.c")]
    subprocess.run(command, check=True, capture_output=True)
    return path


def version_source(version: str) -> str:
    """C source of a library that reports this version."""
    return f'const char * ggml_version(void) {{ return "{version}"; }}'
