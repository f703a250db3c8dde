"""Fuzz targets: every reader of untrusted files.

A target reads one file (a table store is packed into one) or raises StemEdgeError. Its seeds and past
findings are in tests/data/fuzz/TARGET.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fuzzing import mutants
from fuzzing.running import SEEDS
from stem_edge.bundle.edit_files.file import encode_edit, read_edit
from stem_edge.bundle.manifest import encode_manifest, parse_manifest
from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.gguf import open_gguf
from stem_edge.export.tensor_files.safetensors import open_tensors
from stem_edge.export.tokenizers.gguf import read_gguf_tokenizer
from stem_edge.runtime.rows.files import ShardFiles
from stem_edge.runtime.rows.store import RowStore
from stem_edge.special import dense_twin
from stem_edge.tables.shards import open_table_store
from stem_edge.text.chat_template import SAMPLE, ChatTemplate, read_template
from stem_edge.text.tokenizer_gate import check_tokenizer
from stem_edge.text.tool_calls.families import FAMILIES, Family
from stem_edge.text.tool_calls.parser import CallParser

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", 1]},
        "deep": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
        "any": {},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "weather", "parameters": WEATHER}},
    {"function": {"name": "now"}},
]


class Target(NamedTuple):
    """A reader of files, and the function that mutates its files."""

    about: str
    file: str  # name of the file
    change: mutants.Change
    read: Callable[[Path], object]
    refuses: bool = True  # False if the reader accepts every input


def _manifest(path: Path) -> None:
    manifest = parse_manifest(path.read_bytes(), path)
    # Also compute what is derived before any other file is opened: odd sizes must not break it.
    model, tables = manifest.model, manifest.table_format
    _ = manifest.required_files(), manifest.report
    _ = model.active_parameters, dense_twin(model), model.table_parameters
    if tables is not None:
        _ = tables.nbytes, tables.arrays()
    assert parse_manifest(encode_manifest(manifest), path) == manifest


def _edit(path: Path) -> None:
    edit = read_edit(path)
    path.write_bytes(encode_edit(edit))
    assert read_edit(path) == edit


def _store(path: Path) -> None:
    root = path.with_suffix(".zarr")
    shutil.rmtree(root, ignore_errors=True)
    for name, content in mutants.split(path.read_bytes()).items():
        if ".." not in name and not name.startswith("/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
    tables = open_table_store(root)
    with RowStore(tables, ShardFiles(tables.grids)) as store:
        store.read(np.arange(min(store.layout.records, 16)))


def _gguf(path: Path) -> None:
    for tensor in open_gguf(path).tensors.values():
        tensor.rows(0, min(tensor.shape[0], 16))
    try:
        read_gguf_tokenizer(path)  # encodes no text, since the library caches some memory for each
    except CheckpointError:
        raise
    except Exception as error:  # as the export does with all that the library raises
        raise CheckpointError(f"{path}: {type(error).__name__}; expected a tokenizer") from error


@lru_cache(maxsize=1)
def chat_process(path: Path) -> ChatTemplate:
    """Return a cached process that renders chat templates, started with a valid template."""
    data = path.read_bytes()
    shutil.copy(SEEDS / "chat" / "chatml.json", path)
    chat = ChatTemplate(path, seconds=1.0)
    path.write_bytes(data)
    return chat


def _chat(path: Path) -> None:
    # Reuse the process with another template, because starting one for each input is slow.
    chat = chat_process(path)
    chat.source, chat.tool_source, chat.tokens = read_template(path)
    chat.render(SAMPLE)


def _calls(path: Path) -> None:
    """Parse an answer for every tool call family, whole and by character, with equal results."""
    text = path.read_bytes().decode("utf-8", "replace")
    for family in FAMILIES:
        if family.begin not in text and text.lstrip()[:1] != (family.bare or None):
            continue  # no calls
        content, calls = _read_answer(family, [text])
        assert (content, calls) == _read_answer(family, text)
        (content + "".join(calls)).encode()  # raises for text that cannot be sent to a client
        for arguments in calls:
            assert isinstance(json.loads(arguments, parse_constant=_no_json), dict)


def _read_answer(family: Family, deltas: Iterable[str]) -> tuple[str, list[str]]:
    """Return the text of an answer, and the arguments of its calls."""
    parser = CallParser(family, TOOLS)
    pieces = [*(p for delta in deltas for p in parser.push(delta)), *parser.push("", ended=True)]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece.arguments for piece in pieces if not isinstance(piece, str)]


def _no_json(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} in the arguments of a call")


TARGETS = {
    "manifest": Target("a bundle's manifest.json", "manifest.json", mutants.change_json, _manifest),
    "store": Target(
        "a table store: zarr.json files, shards and their indexes, token index; reads 16 records",
        "tables",
        mutants.change_store,
        _store,
    ),
    "edit": Target("an edit file", "x.edit", mutants.change_json, _edit),
    "safetensors": Target(
        "a safetensors file of a checkpoint",
        "x.safetensors",
        mutants.change_safetensors,
        open_tensors,
    ),
    "gguf": Target(
        "a GGUF file of a checkpoint: its keys, tokenizer, and first rows of each tensor",
        "x.gguf",
        mutants.change_bytes,
        _gguf,
    ),
    "tokenizer": Target(
        "tokenizer.json, before the tokenizers library reads it",
        "tokenizer.json",
        mutants.change_json,
        lambda path: check_tokenizer(path, 300),
    ),
    "chat": Target(
        "the chat template in tokenizer_config.json, rendered in its own process",
        "tokenizer_config.json",
        mutants.change_template,
        _chat,
    ),
    "calls": Target(
        "an answer of a model that calls tools, read as each family writes calls",
        "answer.txt",
        mutants.change_answer,
        _calls,
        refuses=False,
    ),
}
