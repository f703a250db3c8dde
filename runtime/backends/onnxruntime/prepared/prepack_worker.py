"""Worker process that prepacks a backbone.

Not a command for users: `stem-edge prepare` and the first load start it with python -m, for the
reason given in prepacked.py.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import onnxruntime as ort

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import StemEdgeError
from stem_edge.graph.apart import apart
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import EMBED, PREFILL, STEP, apart_step
from stem_edge.graph.special.pairs import PAIR
from stem_edge.runtime.backends.interface import (
    BEFORE,
    DEEP,
    SIZES,
    NotFiniteError,
    StepCosts,
)
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholder_rows, placeholders
from stem_edge.runtime.backends.onnxruntime.prepared.folder import JOURNAL
from stem_edge.runtime.backends.onnxruntime.prepared.journal import PackingJournal
from stem_edge.runtime.backends.onnxruntime.prepared.packable import packable
from stem_edge.runtime.backends.onnxruntime.prepared.packing import OtherProductsError, Packer
from stem_edge.runtime.backends.onnxruntime.prepared.prefill_measure import prefill_divergence
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    FORMAT,
    RECORD,
    Prepacked,
    PreparedRecord,
    marks,
    prepared_file,
)
from stem_edge.runtime.backends.onnxruntime.providers.graphs import graph_source, joined_parts
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.runtime.backends.step_measure import Probe, measure_steps
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.system.memory import give_back_freed_blocks, return_freed_memory
from stem_edge.system.user_folder import cpu_digest
from stem_edge.tables.windows import last_rows

REFUSED = (
    f"onnxruntime {ort.__version__} computes other logits from packed weights on this processor"
)
ROUNDS = 3


def make(bundle: Bundle, folder: Path, threads: int, kv: KvType) -> None:
    """Fill the folder, the record last; with the record alone if the prepacked graphs are wrong."""
    give_back_freed_blocks()  # packing frees a matrix of up to 32 MB after another
    packer, refused = Packer(bundle, folder, threads, PackingJournal(folder / JOURNAL)), ""
    try:
        graphs = packable(bundle, kv)
        for name, graph in graphs.items():
            packer.pack(prepared_file(name), graph)
        # onnxruntime would give a token those of the one before as they were before rounding to float16.
        if STEP in graphs and kv != "fp16":
            products = packer.rounding_together(graphs[STEP])
            # Pairs that round together all the same have no bits for graphs that cut them up.
            for size in () if any(name.endswith(PAIR) for name in products) else SIZES:
                graph = apart(graphs[STEP], size, products)
                packer.pack(prepared_file(apart_step(size)), graph)
    except OtherProductsError:
        refused = REFUSED
        for path in folder.iterdir():
            path.unlink()
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.name != JOURNAL):
        _sync(path)  # otherwise a power cut could leave zeros for weights
        files[path.name] = marks(path)
    record = PreparedRecord(
        format=FORMAT,
        bundle=str(bundle.path),
        onnxruntime=ort.__version__,
        cpu=cpu_digest(),
        files=files,
        prefill=None,
        seconds={},
        refused=refused,
    )
    if not refused:
        record = _measured(record, bundle, packer, threads, kv)
    (folder / JOURNAL).unlink(missing_ok=True)
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    _sync(folder / RECORD)


def _measured(
    record: PreparedRecord, bundle: Bundle, packer: Packer, threads: int, kv: KvType
) -> PreparedRecord:
    """Return the record with the times and the divergence of the prepared graphs."""
    if bundle.manifest.has_prefill:
        diverges = prefill_divergence(bundle, _probed(bundle, packer))
        record = msgspec.structs.replace(record, prefill_from_decode=diverges)
        return_freed_memory()
    prompt = _Prompt(bundle, Prepacked(packer.folder, record), threads, kv)
    if (steps := prompt.measure_steps()) is not None:
        steps = msgspec.structs.replace(steps, threads=threads)
    record = msgspec.structs.replace(record, steps=steps)
    if bundle.manifest.has_prefill:
        seconds = _measure(prompt)
        faster = seconds["prefill"] < seconds["decode"]
        record = msgspec.structs.replace(record, prefill=faster, seconds=seconds)
    return record


def _probed(bundle: Bundle, packer: Packer) -> dict[str, GraphSource]:
    """Return graphs with float32 keys and values over the packed weights."""
    embed = joined_parts(bundle, prefill=False)[EMBED]
    packed = {name: packer.source(name, graph) for name, graph in packable(bundle).items()}
    return {EMBED: graph_source(bundle, EMBED, embed), **packed}


class _Prompt:
    """A prompt chunk to compute repeatedly with prepacked graphs."""

    def __init__(self, bundle: Bundle, prepared: Prepacked, threads: int, kv: KvType) -> None:
        config, layout = bundle.manifest.model, bundle.manifest.tables
        self.has_prefill = bundle.manifest.has_prefill
        self.tokens = min(CHUNK_TOKENS, config.max_context)
        length = min(DEEP + max(SIZES), config.max_context)
        slots = ArraySlots(layout, placeholders(layout)) if layout is not None else None
        self._ids = np.arange(length) % config.vocab_size
        self._slots = placeholder_rows(slots, length * config.lookups)
        if config.ngram_order:
            self._slots = self._slots.reshape(length, -1)
        if window := config.row_window:
            self._slots = last_rows(self._ids, self._slots, 0, window, config.eos_ids)
        graphs = prepared.graph_sources(bundle, prefill=self.has_prefill, kv=kv)
        self._backend = OrtBackend(config, graphs, slots, threads, kv, prepared.apart_steps)
        self._context = self._backend.open_context(length)

    def take(self, tokens: int, position: int = 0, *, prefill: bool) -> None:
        """Compute tokens, whose logits need not be numbers: rows are placeholders."""
        places = slice(position, position + tokens)
        self._context.begin(self._ids[places], position, prefill=prefill)
        with contextlib.suppress(NotFiniteError):
            self._context.finish(self._slots[places], 1)

    def measure_steps(self) -> StepCosts | None:
        """Measure steps of several tokens, behind BEFORE or as many as the context has room for."""
        before = min(BEFORE, len(self._ids) - max(SIZES))
        if before < 1:
            return None
        deep = len(self._ids) - max(SIZES)
        for at in range(0, deep, CHUNK_TOKENS):
            self.take(min(CHUNK_TOKENS, deep - at), at, prefill=False)
        described = self._backend, self._context, self._ids, self._slots, before, before + 1
        return measure_steps(Probe(*described, deep))


def _measure(prompt: _Prompt) -> dict[str, float]:
    """Return seconds of a prompt chunk with the graphs for decoding and with the prefill graph."""
    taken: dict[str, list[float]] = {"decode": [], "prefill": []}
    for _ in range(ROUNDS):
        for name, times in taken.items():
            started = time.perf_counter()
            prompt.take(prompt.tokens, prefill=name == PREFILL)
            times.append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def main() -> int:
    """Run with the arguments BUNDLE FOLDER THREADS KV [TABLES]; an error is one line on stderr."""
    path, folder, threads, kv, *tables = sys.argv[1:]
    try:
        make(open_bundle(path, *tables), Path(folder), int(threads), cast(KvType, kv))
    except (StemEdgeError, OSError, MemoryError) as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
