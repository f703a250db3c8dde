"""The prepared backbone: graphs with weights packed once for this processor, and then mapped.

On loading, onnxruntime packs matrices into anonymous memory. The system cannot reclaim it. But
onnxruntime can save what it packed and map it from there, so that a loaded model's weights are
pages of a file. A child process does that (prepack_worker.py), because native code keeps some of
its memory. It also measures which graph is faster for prompts (preparing.py starts it).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import onnxruntime as ort

from stem_edge.bundle.opening import Bundle
from stem_edge.files import disk
from stem_edge.graph.decode import PREFILL_DATA
from stem_edge.graph.formats import BACKBONE_DATA
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import apart_step
from stem_edge.runtime.backends.interface import SIZES, StepCosts
from stem_edge.runtime.backends.onnxruntime.prepared.kept_graphs import kept_graphs
from stem_edge.runtime.backends.onnxruntime.prepared.looking import FOLDER, is_large
from stem_edge.runtime.backends.onnxruntime.prepared.packed_file import plain_nbytes
from stem_edge.runtime.backends.onnxruntime.providers.graphs import joined_graphs
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.system.memory import PROC
from stem_edge.system.user_folder import KEY_CHARS, cache_folder, cpu_digest

FORMAT = 10
RECORD = "prepared.json"
MAX_RECORD_NBYTES = 1 << 20
OF_FILE = np.uint64(61)  # bit of a page in /proc/self/pagemap, below those for swap and memory
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PreparedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of prepared.json."""

    format: int
    bundle: str  # path of the bundle
    onnxruntime: str  # version
    cpu: str  # digest of the processor's features
    files: dict[str, tuple[Size, int]]  # name -> size and mtime in ns, to notice changes
    prefill: bool | None  # whether the prefill graph is faster; None: no such graph
    seconds: dict[str, float]  # graph -> time of a prompt chunk
    # Divergence of the prefill graph from the decoding graph here, in nats; None: not measured.
    prefill_from_decode: float | None = None
    steps: StepCosts | None = None  # of decoding; None if its context is too short for them
    refused: str = ""  # why nothing was prepared, and must not be tried again by a load


class Prepacked(NamedTuple):
    """A prepared backbone in the cache folder."""

    folder: Path
    record: PreparedRecord

    def graph_sources(
        self, bundle: Bundle, *, prefill: bool, kv: KvType = "fp32"
    ) -> Mapping[str, Path | GraphSource]:
        """Return the source of each graph by name: its prepared file, otherwise the graph itself."""
        graphs = kept_graphs(self.folder.parent.parent, bundle, prefill=prefill, kv=kv)
        files = {name: prepared_file(name) for name in graphs}
        there = {
            name: self.folder / file for name, file in files.items() if file in self.record.files
        }
        return graphs | there

    @property
    def apart_steps(self) -> dict[str, Path]:
        """Graphs by name of steps in which each token has the bits of a step of its own."""
        files = {name: prepared_file(name) for name in map(apart_step, SIZES)}
        return {n: self.folder / file for n, file in files.items() if file in self.record.files}

    def give_back_read_pages(self) -> None:
        """Give back pages of plain matrices once sessions are open: they were read for the last time."""
        graphs = {
            self.folder.resolve() / file for file in self.record.files if file.endswith(".onnx")
        }
        files = {graph: graph.with_name(f"{graph.name}.data") for graph in graphs}
        give_back_mapped(
            {f: plain_nbytes(g) for g, f in files.items() if f.name in self.record.files}
        )


class PreparedPlace(NamedTuple):
    """Folder of a bundle's prepared backbone, and its record if it was made."""

    bundle: Bundle
    folder: Path
    record: PreparedRecord | None

    @property
    def prepared(self) -> Prepacked | None:
        """The prepared backbone, if there is one."""
        if self.record is None or self.record.refused:
            return None
        return Prepacked(self.folder, self.record)

    @property
    def is_worth_it(self) -> bool:
        """True if a load uses a prepared backbone, found or made."""
        if self.record is not None:
            return not self.record.refused
        return is_large(self.bundle.manifest)


def place(bundle: Bundle, cache_dir: str | Path | None, kv: KvType = "fp32") -> PreparedPlace:
    """Find the place of a bundle on this machine; the first time, its graphs are built.

    kv: type of keys and values, which is part of the graphs.
    """
    root, prefill = cache_folder(cache_dir), bundle.manifest.has_prefill
    graphs = kept_graphs(root, bundle, prefill=prefill, kv=kv)
    folder = _folder(root, bundle, ort.__version__, graphs)
    return PreparedPlace(bundle, folder, read_prepared(folder))


def prepared_folder(root: Path, bundle: Bundle, onnxruntime: str, kv: KvType = "fp32") -> Path:
    """Return the folder for the prepared backbone of this bundle, processor and onnxruntime."""
    graphs = joined_graphs(bundle, prefill=bundle.manifest.has_prefill, kv=kv)
    return _folder(root, bundle, onnxruntime, graphs)


def _folder(
    root: Path, bundle: Bundle, onnxruntime: str, graphs: Mapping[str, GraphSource]
) -> Path:
    files = bundle.manifest.files
    weights = [files[name].sha256 for name in (BACKBONE_DATA, PREFILL_DATA) if name in files]
    built = hashlib.sha256(b"".join(graph.data for graph in graphs.values())).hexdigest()
    described = repr((FORMAT, onnxruntime, cpu_digest(), weights, built))
    return root / FOLDER / hashlib.sha256(described.encode()).hexdigest()[:KEY_CHARS]


def read_prepared(folder: Path) -> PreparedRecord | None:
    """Return the record of a prepared backbone; None if missing, damaged or of another format."""
    try:
        data = disk.read_file(folder / RECORD, MAX_RECORD_NBYTES)
        record = msgspec.json.decode(data, type=PreparedRecord)
        found = {name: marks(folder / name) for name in record.files}
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return None
    plain = all(Path(name).name == name for name in record.files)
    return record if record.format == FORMAT and plain and found == record.files else None


def marks(path: Path) -> tuple[int, int]:
    """Return size and mtime (ns) of a file. Raises OSError."""
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def prepared_file(graph: str) -> str:
    """Return the name of a prepared graph's file."""
    return f"{graph}.onnx"


def give_back_mapped(files: Mapping[Path, int]) -> None:
    """Give back the mapped pages of files, of each up to a place, unless they were written to.

    Those that are used come back.
    """
    if sys.platform != "linux":
        return
    advise, proc = ctypes.CDLL(None).madvise, PROC / "self"
    places = {str(file): nbytes for file, nbytes in files.items()}
    with contextlib.suppress(OSError), (proc / "pagemap").open("rb", buffering=0) as pages:
        for line in (proc / "maps").read_text(errors="replace").splitlines():
            *words, name = line.split(maxsplit=5)
            if len(words) == 5 and (place := places.get(name)) is not None:
                start, stop = (int(address, 16) for address in words[0].split("-"))
                stop = min(stop, start + place - int(words[2], 16))
                if start < stop and not _written(pages.fileno(), start, stop):
                    nbytes = ctypes.c_size_t(stop - start)
                    advise(ctypes.c_void_p(start), nbytes, mmap.MADV_DONTNEED)


def _written(pagemap: int, start: int, stop: int) -> bool:
    """Tell whether pages of a mapped file were written to, and so are in memory or swap alone."""
    first, count = start // mmap.PAGESIZE, -(-(stop - start) // mmap.PAGESIZE)
    entries = np.frombuffer(os.pread(pagemap, 8 * count, 8 * first), np.uint64)
    kinds = entries >> OF_FILE  # odd: pages of the file; 0: none yet; 2, 4: in swap or memory alone
    return bool(((kinds > 0) & (kinds % 2 == 0)).any())
