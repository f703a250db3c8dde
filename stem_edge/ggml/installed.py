"""Finds the installed ggml library, without loading it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from stem_edge.errors import BackendError

INSTALL = "pip install 'stem-edge[gguf]'"
# --no-cache-dir, because pip would reuse an earlier build, whatever it was compiled for.
REINSTALL = "pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python==0.3.36"
AGAIN = f"install it again with: {REINSTALL}"
LIBRARY_NAMES = {"darwin": "libggml.dylib", "win32": "ggml.dll"}
FOLDERS = ("lib", "bin")  # of llama_cpp; which one depends on release and system


def library_path() -> Path | None:
    """Return the path of llama-cpp-python's libggml, or None if it is not installed."""
    spec = find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    name = LIBRARY_NAMES.get(sys.platform, "libggml.so")
    folders = spec.submodule_search_locations
    paths = (Path(folder, part, name) for folder in folders for part in FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def installed_library() -> Path:
    """Return the path of llama-cpp-python's libggml. Raises BackendError if it is not installed."""
    path = library_path()
    if path is None:
        raise BackendError(
            "the ggml engine needs the shared libraries of llama-cpp-python, which are not "
            f"installed; run: {INSTALL} (compiling takes some minutes, see docs/run.md)"
        )
    return path


def library_files(library: Path) -> tuple[str, list[tuple[str, int, int]]]:
    """Return libggml's real path, and (name, size, mtime in ns) of ggml's files. Raises OSError."""
    found = [library, *library.parent.glob("*ggml*")]
    stats = {path.name: path.stat() for path in found}
    files = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
    return str(library.resolve()), files
