"""Which files of a checkpoint's folder an export may read, so that a change of others means nothing."""

from __future__ import annotations

from pathlib import PurePath

# Models, tokenizers and adapters only: a training run may still be writing logs, a person notes.
SUFFIXES = (".safetensors", ".pth", ".pt", ".distcp", ".json", ".model", ".jinja")
INDEX = ".metadata"


def is_read(file: PurePath) -> bool:
    """Return whether an export may read a file of a checkpoint's folder."""
    return file.suffix in SUFFIXES or file.name == INDEX
