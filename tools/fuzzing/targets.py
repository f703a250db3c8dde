"""What is fuzzed: everything that reads bytes which somebody else may have made.

Each target takes the bytes of a file, or of the files of a table store in one, and returns what it
read, or raises StemEdgeError. Its seeds, and the findings of old, lie in tests/data/fuzz/TARGET.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeAlias

from fuzzing import mutants

SEEDS = Path(__file__).resolve().parents[2] / "tests" / "data" / "fuzz"
Read: TypeAlias = Callable[[bytes], object]


class Target(NamedTuple):
    """One harness."""

    about: str
    change: mutants.Change
    # With a folder for files, which every message must name, and what is closed in the end. Imports
    # what it reads with, so that atheris can instrument it.
    prepare: Callable[[Path, ExitStack], Read]


def seeds_of(name: str) -> dict[str, bytes]:
    """File name -> bytes."""
    return {path.name: path.read_bytes() for path in sorted((SEEDS / name).iterdir())}


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

    def read(data: bytes) -> None:
        shutil.rmtree(root, ignore_errors=True)
        for name, content in mutants.split(data).items():
            if ".." not in name and not name.startswith("/"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
        with RowStore(open_table_store(root)) as store:
            store.read(np.arange(min(store.layout.records, 16)))

    return read


def _edit(folder: Path, end: ExitStack) -> Read:
    from stem_edge.edit_file import read_edit

    return _file(folder / "x.edit", read_edit)


def _safetensors(folder: Path, end: ExitStack) -> Read:
    from stem_edge.export.safetensors_files import open_tensors

    return _file(folder / "x.safetensors", open_tensors)


def _torch(folder: Path, end: ExitStack) -> Read:
    from stem_edge.export.stored import StoredTensor
    from stem_edge.export.torch_files import load_tensors

    def read(path: Path) -> None:
        for value in load_tensors(path).values():
            if isinstance(value, StoredTensor) and value.shape:
                value.rows(0, min(value.shape[0], 16))

    return _file(folder / "x.pth", read)


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
    path.write_bytes((SEEDS / "chat" / "chatml.json").read_bytes())
    chat = end.enter_context(ChatTemplate(path, seconds=1.0))

    def read(path: Path) -> None:
        # The process goes on with another template, so that not each input starts one.
        chat.source, chat.tokens = read_template(path)
        chat.render(SAMPLE)

    return _file(path, read)


def _file(path: Path, read: Callable[[Path], object]) -> Read:
    def put_and_read(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return put_and_read


TARGETS = {
    "manifest": Target("manifest.json of a bundle", mutants.change_json, _manifest),
    "zarr": Target("a zarr.json by itself", mutants.change_json, _zarr),
    "store": Target(
        "a table store: zarr.json files, shards with their indexes, token index; reads all records",
        mutants.change_store,
        _store,
    ),
    "edit": Target("an edit file", mutants.change_edit, _edit),
    "safetensors": Target(
        "a safetensors file of a checkpoint", mutants.change_safetensors, _safetensors
    ),
    "torch": Target(
        "a file of torch.save: its archive, its pickle, the first values of each tensor",
        mutants.change_archive,
        _torch,
    ),
    "tokenizer": Target(
        "tokenizer.json before the tokenizers library sees it", mutants.change_json, _tokenizer
    ),
    "template": Target(
        "the chat template in tokenizer_config.json, read and parsed",
        mutants.change_template,
        _template,
    ),
    "chat": Target("the same, rendered in its process (slower)", mutants.change_template, _chat),
}
