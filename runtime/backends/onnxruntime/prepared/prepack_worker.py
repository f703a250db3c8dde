"""Worker process that saves a backbone with weights repacked for this processor.

Not a command for users: `stem-edge prepare` and the first load start it (preparing.py). It exits when its
stdin is closed, which happens if the process that waits for it is killed.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import StemEdgeError
from stem_edge.files.hashing import sha256_of
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import EMBED, STEP, apart_step
from stem_edge.graph.special.apart import apart
from stem_edge.graph.special.gate_up import gate_up_joined
from stem_edge.runtime.backends.costs import MOST, SIZES
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.loaded import Rows
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholder_rows
from stem_edge.runtime.backends.onnxruntime.prepared.deciding import MEASURED_TOKENS
from stem_edge.runtime.backends.onnxruntime.prepared.packing import Packer
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    RECORD,
    Prepacked,
    PreparedRecord,
    marks,
    prepared_file,
)
from stem_edge.runtime.backends.onnxruntime.providers.graphs import graph_source
from stem_edge.runtime.backends.onnxruntime.providers.joined import joined_parts
from stem_edge.runtime.backends.step_measure import MeasuredSteps
from stem_edge.system.child import end_with_parent
from stem_edge.system.memory import give_back_freed_blocks
from stem_edge.tables.windows import last_rows

# Single tokens are padded to two if a step takes at most this many times as long. An assistant's drafts need padding.
PADDING, PADDING_FOR_ASSISTANT = 1.05, 1.25
PADDING_ROUNDS = 16  # measurements of both steps in turns, of which the fastest count


def make(bundle: Bundle, folder: Path, threads: int, kv: KvType) -> None:
    """Write graphs with repacked weights to the folder, prepared.json last. Raises StemEdgeError, OSError."""
    give_back_freed_blocks()  # because packing frees many matrices of up to 32 MB
    packer = Packer(bundle, folder, threads)
    parts = joined_parts(bundle, prefill=bundle.manifest.has_prefill, kv=kv)
    graphs = {name: gate_up_joined(graph) for name, graph in parts.items()}
    embed = graph_source(bundle, EMBED, graphs.pop(EMBED))  # its matrix is read in place anyway
    (folder / prepared_file(EMBED)).write_bytes(embed.data)
    graphs |= {apart_step(size): apart(graphs[STEP], size) for size in SIZES}
    for name, graph in graphs.items():
        packer.pack(prepared_file(name), graph)
    paths = sorted(folder.iterdir())
    record = PreparedRecord(
        bundle=str(bundle.path),
        weights=str(embed.folder.absolute()),
        files={path.name: (*marks(path), "") for path in paths},
    )
    with ThreadPoolExecutor(1) as pool:  # while steps are compared, which takes longer
        hashes = pool.map(_synced, paths)
        record = _measured(bundle, Prepacked(folder, record), threads, kv)
    files = {path.name: (*marks(path), sha256) for path, sha256 in zip(paths, hashes, strict=True)}
    record = msgspec.structs.replace(record, files=files)
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    _synced(folder / RECORD)


def _measured(bundle: Bundle, prepared: Prepacked, threads: int, kv: KvType) -> PreparedRecord:
    """Return the contents of prepared.json, with times of decoding steps on random rows.

    Without times if the model's context is too short for the longest of these steps, or if only single-token
    steps of one sequence compute their bits: a load that drafts anyway measures the times itself.
    """
    config = bundle.manifest.model
    length = min(MEASURED_TOKENS, config.max_context)
    if length <= MOST:
        return prepared.record
    ids = np.arange(length) % config.vocab_size
    slots, rows = placeholder_rows(bundle.manifest.tables, length * config.lookups)
    if config.ngram_order:
        rows = rows.reshape(length, -1)
    if window := config.row_window:
        rows = last_rows(ids, rows, 0, window, config.eos_ids)
    graphs = prepared.graph_sources(bundle, prefill=False, kv=kv)
    apart_steps = prepared.apart_steps
    backend = OrtBackend(config, graphs, slots, threads, kv, apart_steps, rows="any", sparing=True)
    steps = MeasuredSteps(backend, ids, rows)
    chosen: Rows = "any" if steps.same_in_batches and steps.same_bits else ""
    if not steps.same_bits:
        backend.loaded = replace(backend.loaded, rows="even")
        even = MeasuredSteps(backend, ids, rows)
        most = PADDING_FOR_ASSISTANT if bundle.manifest.assistant else PADDING
        turns = [(even.seconds(1), steps.seconds(1)) for _ in range(PADDING_ROUNDS)]
        padded, alone = (min(times) for times in zip(*turns, strict=True))
        if even.same_bits and padded <= most * alone:
            steps, chosen = even, "even"
    if not (steps.same_bits or steps.same_in_batches):
        return prepared.record
    costs = msgspec.structs.replace(steps.costs(), threads=threads)
    return msgspec.structs.replace(prepared.record, steps=costs, rows=chosen)


def _synced(path: Path) -> str:
    """Sync a file, because otherwise a power cut could leave zeros for weights. Return its sha256."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return sha256_of(path, path.stat().st_size, lambda _: None)


def main() -> int:
    """Run with the arguments BUNDLE FOLDER THREADS KV [TABLES]; an error is one line on stdout."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    path, folder, threads, kv, *tables = sys.argv[1:]
    try:
        make(open_bundle(path, *tables), Path(folder), int(threads), cast(KvType, kv))
    except (StemEdgeError, OSError, MemoryError) as error:
        print(" ".join(str(error).split()) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
