"""The prepared backbone in the cache folder: graphs saved with weights repacked for this processor.

Without it, each load packs matrices into anonymous memory, which the system cannot reclaim. A prepared
backbone is mapped, so a loaded model's weights are pages of a file. A child process packs
(prepack_worker.py), because native code does not free all of its memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import onnxruntime as ort

from stem_edge.bundle.manifest import digest, encode_manifest
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.names import PREPARED, cache_folder
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import EMBED, apart_step
from stem_edge.runtime.backends.costs import SIZES, StepCosts
from stem_edge.runtime.backends.onnxruntime.backend import only_prompts
from stem_edge.runtime.backends.onnxruntime.loaded import Rows
from stem_edge.runtime.backends.onnxruntime.prepared.mapped_pages import (
    give_back_mapped,
    packed_places,
)
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.runtime.backends.onnxruntime.saved_graphs import builders
from stem_edge.system.processor import cpu_digest

FORMAT = 16
CHECK_SECONDS = 86_400  # between checks of sha256, which take as long as a load
RECORD = "prepared.json"
MAX_NBYTES = 1 << 20  # of the record, and of the embedding's graph
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PreparedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of prepared.json: files with repacked weights, and measured times of decoding steps."""

    bundle: str  # path of the bundle
    weights: str  # folder of the weight file that the embedding is read from
    # Name -> size, mtime in ns and sha256, to notice changes.
    files: dict[str, tuple[Size, int, str]]
    steps: StepCosts | None = None  # of decoding; None if the context is too short to measure them
    rows: Rows = ""


class Prepacked(NamedTuple):
    """Graphs of a backbone in the cache folder, with weights repacked for this processor."""

    folder: Path
    record: PreparedRecord

    def graph_sources(
        self, bundle: Bundle, *, prefill: bool, kv: KvType
    ) -> Mapping[str, Path | GraphSource]:
        """Return graph name -> file with repacked weights; for the embedding, a graph that reads the bundle's weights.

        prefill: include the graphs that only prompts need.
        """
        names = [Path(name).stem for name in self.record.files if name.endswith(".onnx")]
        unused = {EMBED, *map(apart_step, SIZES), *(() if prefill else only_prompts(names))}
        there = {name: self._file(name) for name in names if name not in unused}
        return {EMBED: self._embedding(bundle, kv), **there}

    def _embedding(self, bundle: Bundle, kv: KvType) -> GraphSource:
        """Return the embedding's saved graph, or build it (in 0.1 s) if the bundle was moved."""
        if self.record.bundle != str(bundle.path.resolve()):
            from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs

            return cpu_graphs(bundle, prefill=False, kv=kv)[EMBED]
        data = disk.read_file(self._file(EMBED), MAX_NBYTES)
        return GraphSource(EMBED, data, Path(self.record.weights), bundle.path)

    @property
    def apart_steps(self) -> dict[str, Path]:
        """Graph name -> file: steps of several tokens, with the exact logits of one-token steps."""
        names = map(apart_step, SIZES)
        return {name: self._file(name) for name in names if f"{name}.onnx" in self.record.files}

    def give_back_read_pages(self) -> None:
        """Drop pages of plain matrices from memory; open sessions read of them only rows of the embedding."""
        ends = dict[Path, int]()
        for name in self.record.files:
            graph = self.folder.resolve() / name
            if (data := graph.with_name(f"{name}.data")).name in self.record.files:
                ends[data] = min((offset for offset, _ in packed_places(graph)), default=0)
        give_back_mapped(ends)

    def _file(self, graph: str) -> Path:
        return self.folder / prepared_file(graph)


def find_prepared(bundle: Bundle, cache_dir: str | Path | None, kv: KvType) -> Prepacked | None:
    """Return the graphs that this machine saved with repacked weights, for KV cache type `kv`; None without them."""
    return read_prepared(prepared_folder(cache_dir, bundle, kv))


def prepared_folder(cache_dir: str | Path | None, bundle: Bundle, kv: KvType) -> Path:
    """Return the folder for repacked weights of this bundle, for this processor and onnxruntime version."""
    manifest = encode_manifest(bundle.manifest)  # with the checksums of the weights
    key = digest(FORMAT, builders(), ort.__version__, cpu_digest(), manifest, kv)
    return cache_folder(cache_dir) / PREPARED / key


def read_prepared(folder: Path) -> Prepacked | None:
    """Return the graphs of a folder; None if its record is missing or of another form, or if any file is damaged."""
    try:
        data = disk.read_file(folder / RECORD, MAX_NBYTES)
        record = msgspec.json.decode(data, type=PreparedRecord)
        if any(Path(name).name != name for name in record.files):
            return None
        if any(found[:2] != marks(folder / name) for name, found in record.files.items()):
            return None
        if (folder / RECORD).stat().st_mtime < time.time() - CHECK_SECONDS:
            from stem_edge.files.hashing import sha256_of

            for name, (size, _, sha256) in record.files.items():
                if sha256_of(folder / name, size, lambda _: None) != sha256:
                    return None
            os.utime(folder / RECORD)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError, BundleError):
        return None
    return Prepacked(folder, record) if prepared_file(EMBED) in record.files else None


def marks(path: Path) -> tuple[int, int]:
    """Return size and mtime (ns) of a file, to notice later if the file has changed. Raises OSError."""
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def prepared_file(graph: str) -> str:
    return f"{graph}.onnx"
