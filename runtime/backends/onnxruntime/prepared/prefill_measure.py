"""Measures how far the graph for prompts is from those that decode, on this processor."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import mean_divergence, probe_tokens
from stem_edge.errors import RowReadError
from stem_edge.graph.names import EMBED, STEP
from stem_edge.numerics.quantize import F32, I32, I64, U8
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.prepared.packable import LOGITS_AT_ONCE
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.runtime.rows.records import records_of
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.windows import last_rows

UNUSABLE = 1e9  # nats, for logits that are not finite, because JSON has no infinity


def prefill_divergence(bundle: Bundle, graphs: Mapping[str, GraphSource]) -> float | None:
    """Return the divergence of the prefill graph from those that decode here, in nats.

    graphs: as of `joined_graphs`, with float32 keys and values. Those that decode are closed before
    the others are opened. None if the bundle has no probe (stem_edge.bundle.prefill_check), or if
    rows cannot be read, because reading them in use raises a better error. Of tables elsewhere,
    that is raised here: they may be back soon, and the result would stay.
    """
    manifest, ids = bundle.manifest, np.array(probe_tokens(bundle.manifest), np.int64)
    if not len(ids):
        return None
    slots = None
    if manifest.tables is not None:
        if (rows := _rows(bundle, ids)) is None:
            return None
        slots = ArraySlots(manifest.tables, len(rows))
        slots.write(np.arange(len(rows)), rows)
    logits = []
    for prefill in (False, True):
        used = {n: graph for n, graph in graphs.items() if n == EMBED or (n == STEP) != prefill}
        backend = OrtBackend(manifest.model, used, slots, 1)
        with contextlib.suppress(NotFiniteError):
            logits.append(_logits(backend, ids, prefill=prefill))
        backend.close()
    return mean_divergence(*logits) if len(logits) == 2 else UNUSABLE


def _rows(bundle: Bundle, ids: I64) -> U8 | None:
    root, url, format = bundle.file(TABLES), bundle.tables, bundle.manifest.table_format
    if bundle.manifest.model.ngram_order:
        from stem_edge.numerics.ngram_hash import hash_of  # for such models alone

        ids = hash_of(bundle.manifest.model).keys(ids).ravel()
    passes = (RowReadError,) if url is None else ()
    if format is not None:
        with contextlib.suppress(*passes), open_store(root, format, url=url) as store:
            return store.read(records_of(store, ids))
    return None


def _logits(backend: OrtBackend, ids: I64, *, prefill: bool) -> F32:
    config, context = backend.loaded.config, backend.open_context(len(ids))
    slots: I32 = np.arange(len(ids) * config.lookups, dtype=np.int32)
    if config.ngram_order:
        slots = slots.reshape(len(ids), -1)
    if window := config.row_window:
        slots = last_rows(ids, slots, 0, window, config.eos_ids)
    logits = np.empty((len(ids), backend.loaded.config.vocab_size), np.float32)
    for at in range(0, len(ids), LOGITS_AT_ONCE):
        places = slice(at, at + LOGITS_AT_ONCE)
        context.begin(ids[places], at, prefill=prefill)
        logits[places] = context.finish(slots[places], len(ids[places]))
    return logits
