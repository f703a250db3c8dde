"""What is fuzzed: everything that reads bytes which somebody else may have made.

Each target takes the bytes of a file, or of the files of a table store in one, and returns what it
read, or raises StemEdgeError. Seeds lie in tests/data/fuzz/TARGET; tools/fuzz_seeds.py makes them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeAlias

import fuzz_mutators as mutators

SEEDS = Path(__file__).resolve().parents[1] / "tests" / "data" / "fuzz"
Read: TypeAlias = Callable[[bytes], object]


class Target(NamedTuple):
    """One harness."""

    about: str
    modules: tuple[str, ...]  # whose code is looked at for coverage; imported before `prepare`
    mutate: mutators.Mutator
    # With a folder for files, which every message must name, and what is closed in the end.
    prepare: Callable[[Path, ExitStack], Read]
    runs: int = 20_000  # of a short test

    def seeds(self, name: str) -> dict[str, bytes]:
        """Its seeds and the findings of old: file name -> bytes."""
        return {path.name: path.read_bytes() for path in sorted((SEEDS / name).iterdir())}

    def missing(self) -> str | None:
        """What is not installed that it needs."""
        try:
            for module in self.modules:
                importlib.import_module(module)
        except ImportError as error:
            return str(error)
        return None


def put(path: Path, data: bytes) -> None:
    """Write a file; the shortest way, because it is done for every input."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    os.close(descriptor)


def _manifest(folder: Path, end: ExitStack) -> Read:
    from stem_edge.bundle import encode_manifest, parse_manifest

    path = folder / "manifest.json"

    def read(data: bytes) -> None:
        manifest = parse_manifest(data, path)
        # What whoever opens a bundle works out before looking at other files.
        model, tables = manifest.model, manifest.table_format
        _ = manifest.required_files(), manifest.report
        _ = model.active_parameters, model.dense_twin(), model.table_parameters
        if tables is not None:
            _ = tables.nbytes, tables.mean_record_nbytes, tables.arrays()
        parse_manifest(encode_manifest(manifest), path)

    return read


def _zarr(folder: Path, end: ExitStack) -> Read:
    from stem_edge.zarr_json import parse_json

    return lambda data: parse_json(data, folder / "zarr.json")


def _store(folder: Path, end: ExitStack) -> Read:
    import numpy as np

    from stem_edge.runtime.store import RowStore
    from stem_edge.table_store import open_table_store

    root = folder / "tables.zarr"
    there: dict[str, bytes] = {}

    def read(data: bytes) -> None:
        _replace(root, there, mutators.split(data))
        with RowStore(open_table_store(root)) as store:
            store.read(np.arange(min(store.layout.records, 16)))

    return read


def _replace(root: Path, there: dict[str, bytes], files: dict[str, bytes]) -> None:
    """Make the folder hold these files; `there` are those that it has."""
    try:
        for name in there.keys() - files.keys():
            (root / name).unlink()
            del there[name]
        for name, data in files.items():
            if there.get(name) != data:
                path = root / name
                if name not in there:
                    path.parent.mkdir(parents=True, exist_ok=True)
                put(path, data)
                there[name] = data
    except (OSError, ValueError):  # names that no folder can have, or not at once: then nothing
        shutil.rmtree(root, ignore_errors=True)
        there.clear()


def _edit(folder: Path, end: ExitStack) -> Read:
    from stem_edge.edit_file import read_edit

    return _file(folder / "x.edit", read_edit)


def _safetensors(folder: Path, end: ExitStack) -> Read:
    from stem_edge.export.safetensors_files import open_tensors

    return _file(folder / "x.safetensors", open_tensors)


def _tokenizer(folder: Path, end: ExitStack) -> Read:
    from stem_edge.tokenizer_gate import read_tokenizer

    return _file(folder / "tokenizer.json", lambda path: read_tokenizer(path, 300))


def _template(folder: Path, end: ExitStack) -> Read:
    from stem_edge.chat_template import read_template
    from stem_edge.chat_worker import environment

    def read(path: Path) -> None:
        source, _ = read_template(path)
        with contextlib.suppress(Exception):  # chat_worker makes an answer of each
            environment().parse(source)

    return _file(folder / "tokenizer_config.json", read)


def _chat(folder: Path, end: ExitStack) -> Read:
    from stem_edge.chat_template import SAMPLE, ChatTemplate, read_template

    path = folder / "tokenizer_config.json"
    put(path, (SEEDS / "chat" / "chatml.json").read_bytes())
    chat = end.enter_context(ChatTemplate(path, seconds=1.0))

    def read(path: Path) -> None:
        # The process goes on with another template, so that not each input starts one.
        chat.source, chat.tokens = read_template(path)
        chat.render(SAMPLE)

    return _file(path, read)


def _file(path: Path, read: Callable[[Path], object]) -> Read:
    def put_and_read(data: bytes) -> None:
        put(path, data)
        read(path)

    return put_and_read


TARGETS = {
    "manifest": Target(
        "manifest.json of a bundle",
        ("stem_edge.bundle", "stem_edge.config", "stem_edge.strict_json", "stem_edge.rows"),
        mutators.json_file,
        _manifest,
    ),
    "zarr": Target(
        "a zarr.json by itself",
        ("stem_edge.zarr_json", "stem_edge.strict_json"),
        mutators.json_file,
        _zarr,
    ),
    "store": Target(
        "a table store: zarr.json files, shards with their indexes, token index; reads all records",
        (
            "stem_edge.table_store",
            "stem_edge.shards",
            "stem_edge.token_index",
            "stem_edge.zarr_json",
            "stem_edge.rows",
            "stem_edge.plain_files",
            "stem_edge.runtime.store",
        ),
        mutators.store_files,
        _store,
        8_000,
    ),
    "edit": Target(
        "an edit file",
        ("stem_edge.edit_file", "stem_edge.edit_schemes"),
        mutators.edit_file,
        _edit,
    ),
    "safetensors": Target(
        "a safetensors file of a checkpoint",
        ("stem_edge.export.safetensors_files",),
        mutators.safetensors_file,
        _safetensors,
        5_000,
    ),
    "tokenizer": Target(
        "tokenizer.json before the tokenizers library sees it",
        ("stem_edge.tokenizer_gate", "stem_edge.tokenizer_steps"),
        mutators.json_file,
        _tokenizer,
    ),
    "template": Target(
        "the chat template in tokenizer_config.json, read and parsed",
        ("stem_edge.chat_template", "stem_edge.chat_worker"),
        mutators.tokenizer_config,
        _template,
        5_000,
    ),
    "chat": Target(
        "the same, rendered in its process (slower)",
        ("stem_edge.chat_template",),
        mutators.tokenizer_config,
        _chat,
        150,
    ),
}
