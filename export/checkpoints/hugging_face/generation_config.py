"""Reads the sampling options that a model's makers recommend, from a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stem_edge.export.tensor_files.json import convert_options, read_json
from stem_edge.sampling import FILTERS, Sampling

GENERATION_CONFIG = "generation_config.json"
PENALTY = "repetition_penalty"
# Keys of GGUF files, as llama.cpp has them.
GGUF_KEYS = {"temp": "temperature", "penalty_repeat": PENALTY} | {name: name for name in FILTERS}


def of_folder(folder: Path) -> Sampling | None:
    """Return sampling options from generation_config.json; None if none. Raises CheckpointError."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return None
    given = read_json(path, "a JSON object", dict[str, Any])
    said = {name: given.get(name) for name in ("temperature", *FILTERS, PENALTY)}
    if said[PENALTY] == 1:
        said[PENALTY] = None
    if given.get("do_sample") is False:
        said = {"temperature": 0.0, PENALTY: said[PENALTY]}
    elif said["temperature"] is None and (
        given.get("do_sample") or any(said[name] is not None for name in FILTERS)
    ):
        said["temperature"] = 1.0
    return _checked(path, said)


def of_gguf(path: Path, keys: Mapping[str, object]) -> Sampling | None:
    """Return sampling options from a GGUF file's keys; None if none. Raises CheckpointError."""
    found = {ours: keys.get(f"general.sampling.{theirs}") for theirs, ours in GGUF_KEYS.items()}
    return _checked(path, found)


def _checked(path: Path, said: Mapping[str, object]) -> Sampling | None:
    given = {name: value for name, value in said.items() if value is not None}
    return convert_options(path, given, Sampling) if given else None
