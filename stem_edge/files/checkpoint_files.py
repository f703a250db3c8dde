"""Which files of a checkpoint's folder an export may read, so that a change of others means nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from glob import escape
from pathlib import Path, PurePath

SUFFIX = ".gguf"
SPLIT = re.compile(rf"(.*-)\d{{5}}(-of-\d{{5}}{re.escape(SUFFIX)})")
# Files that tell the trainer of a folder (stem_edge.export.checkpoints.readers).
MARKS = ("config.json", "params.json", "state_step*.pt", "best_model*.pt")
# Models, tokenizers and adapters only: a training run may still be writing logs, a person notes.
SUFFIXES = (".safetensors", ".pth", ".pt", ".distcp", ".json", ".model", ".jinja")
INDEX = ".metadata"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path looks like something to make a bundle of."""
    with contextlib.suppress(OSError):  # which opening it as a bundle explains
        if path.is_dir():
            return any(next(path.glob(mark), None) for mark in MARKS)
        return path.suffix == SUFFIX and path.is_file()
    return False


def is_read(file: PurePath) -> bool:
    """Return whether an export may read a file of a checkpoint's folder."""
    return file.suffix in SUFFIXES or file.name == INDEX


def file_states(path: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of a checkpoint's files. Raises OSError."""
    found = {file.name: file.stat() for file in _parts(path)}
    if path.is_dir():
        every = (file for file in path.rglob("*") if is_read(file) and file.is_file())
        found = {file.relative_to(path).as_posix(): file.stat() for file in every}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in sorted(found.items())}


def _parts(path: Path) -> Iterator[Path]:
    """Yield the files of a model that may be split into several."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        yield path
    else:
        yield from path.parent.glob(f"{escape(split[1])}[0-9]*{escape(split[2])}")
