"""Makes a prepared backbone, in a process of its own: python -m stem_edge.runtime.prepare_worker.

Not a command for users: `stem-edge prepare` and the first load start it, and `prepared.py` says why.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort

from stem_edge.bundle import Bundle, open_bundle
from stem_edge.errors import StemEdgeError
from stem_edge.graph.names import PREFILL
from stem_edge.quantize import F32
from stem_edge.runtime.backend import NotFiniteError
from stem_edge.runtime.backend_ort import OrtBackend
from stem_edge.runtime.graphs import GraphSource
from stem_edge.runtime.made_up import slot_ids
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.plan import CHUNK_TOKENS
from stem_edge.runtime.prepared import graph_sources, prepared_file, worth_preparing
from stem_edge.runtime.providers import CPU
from stem_edge.runtime.slots import ArraySlots
from stem_edge.runtime.user_cache import FORMAT, RECORD, Prepared, cpu_digest, marks

REFUSED = (
    f"onnxruntime {ort.__version__} computes other logits from what it saved on this processor"
)
ROUNDS = 3
CHECKED_TOKENS = 4


def make(bundle: Bundle, folder: Path, threads: int) -> None:
    """Fill the folder, its record last; with the record alone, if what was saved is not right."""
    for name, graph in worth_preparing(bundle).items():
        open_session(graph, threads, [CPU], save_to=folder / prepared_file(name))
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)  # or a power cut could leave weights of zeros
        files[path.name] = marks(path)
    record = Prepared(
        format=FORMAT,
        bundle=str(bundle.path),
        onnxruntime=ort.__version__,
        cpu=cpu_digest(),
        files=files,
        prefill=None,
        seconds={},
    )
    for prefill in {False, bundle.manifest.has_prefill}:
        if not _computes_the_same(bundle, folder, record, threads, prefill=prefill):
            for name in files:
                (folder / name).unlink()
            _write(folder, msgspec.structs.replace(record, files={}, refused=REFUSED))
            return
    if bundle.manifest.has_prefill:
        seconds = _measure(bundle, graph_sources(bundle, (folder, record), prefill=True), threads)
        faster = seconds["prefill"] < seconds["decode"]
        record = msgspec.structs.replace(record, prefill=faster, seconds=seconds)
    _write(folder, record)


def _write(folder: Path, record: Prepared) -> None:
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    _sync(folder / RECORD)


def _computes_the_same(
    bundle: Bundle, folder: Path, record: Prepared, threads: int, *, prefill: bool
) -> bool:
    """Whether what was saved gives the same logits, bit for bit, as what it was saved from."""
    expected, found = (
        _logits(bundle, graph_sources(bundle, source, prefill=prefill), threads, prefill=prefill)
        for source in (None, (folder, record))
    )
    return np.array_equal(expected, found, equal_nan=True)


def _logits(
    bundle: Bundle, graphs: Mapping[str, Path | GraphSource], threads: int, *, prefill: bool
) -> F32:
    config = bundle.manifest.model
    count = min(CHECKED_TOKENS, config.max_context, config.vocab_size)
    context = _open(bundle, graphs, count, threads).open_context(count)
    context.begin(np.arange(count), 0, prefill=prefill)
    try:
        return context.finish(slot_ids(bundle.manifest.tables, count), 1).copy()
    except NotFiniteError:  # which made-up rows may give
        return np.full((1, config.vocab_size), np.nan, np.float32)


def _open(
    bundle: Bundle, graphs: Mapping[str, Path | GraphSource], tokens: int, threads: int
) -> OrtBackend:
    """A backend whose slots hold some rows."""
    layout, storage = bundle.manifest.tables, None
    if layout is not None:
        numbers = np.unique(slot_ids(layout, tokens)).astype(np.int64)
        storage, rng = ArraySlots(layout, len(numbers)), np.random.default_rng(0)
        shape = (len(numbers), layout.row_width)
        rows = [rng.standard_normal(shape, np.float32) for _ in layout.layers]
        storage.write(numbers, layout.pack(rows))
    return OrtBackend(bundle.manifest.model, graphs, storage, threads, [CPU])


def _measure(
    bundle: Bundle, graphs: Mapping[str, Path | GraphSource], threads: int
) -> dict[str, float]:
    """Seconds of a prompt chunk through the graphs for decoding and through the prefill graph."""
    config = bundle.manifest.model
    count = min(CHUNK_TOKENS, config.max_context, config.vocab_size)
    backend = _open(bundle, graphs, count, threads)
    context = backend.open_context(count)
    ids = np.arange(count)
    slots = slot_ids(bundle.manifest.tables, count)
    taken: dict[str, list[float]] = {"decode": [], "prefill": []}
    for _ in range(ROUNDS):
        for name, times in taken.items():
            started = time.perf_counter()
            context.begin(ids, 0, prefill=name == PREFILL)
            context.finish(slots, 1)
            times.append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def main() -> int:
    """Bundle, folder and threads come as arguments; what went wrong goes to stderr, in one line."""
    path, folder, threads = sys.argv[1:]
    try:
        make(open_bundle(path), Path(folder), int(threads))
    except (StemEdgeError, OSError, MemoryError) as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
