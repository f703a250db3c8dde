"""Lists the files of a checkpoint that an export may read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

SUFFIX = ".gguf"
CONFIG = "config.json"  # of a Hugging Face folder
# Files by which stem_edge.export.checkpoints.readers recognizes the trainer of a folder.
MARKS = (CONFIG, "params.json", "state_step*.pt", "best_model*.pt")
# Files of tokenizers, for all trainers.
TOKENIZERS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)
# Only files of models, tokenizers and adapters: logs and notes may change during an export.
HUGGING_FACE = (
    *(CONFIG, "*.safetensors", "*.safetensors.index.json"),
    *("generation_config.json", "adapter_config.json"),
)
OTHERS = ("*.safetensors", "*.pth", "*.pt", "*.json")


def is_checkpoint(path: Path) -> bool:
    """Return True if a path looks like a checkpoint: a GGUF file or a known trainer's folder."""
    with contextlib.suppress(OSError):  # opening the path as a bundle reports the error
        if path.is_dir():
            return any(next(path.glob(mark), None) for mark in MARKS)
        return path.suffix == SUFFIX and path.is_file()
    return False


def read_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint folder that an export may read."""
    hugging_face = (folder / CONFIG).is_file()
    patterns = TOKENIZERS + (HUGGING_FACE if hugging_face else OTHERS)
    for file in folder.glob("*") if hugging_face else folder.rglob("*"):
        if any(fnmatchcase(file.name, pattern) for pattern in patterns) and file.is_file():
            yield file


def file_states(path: Path) -> dict[str, tuple[int, int]]:
    """Map the name of each file of a checkpoint to its size and mtime in ns. Raises OSError."""
    found = {path.name: path.stat()}
    if path.is_dir():
        found = {file.relative_to(path).as_posix(): file.stat() for file in read_files(path)}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in sorted(found.items())}
