"""Tries a bundle's tokenizer in a process of its own: python -m stem_edge.runtime.first_load.trial_worker.

Not a command for users: `stem_edge.runtime.first_load.trial` starts it, and says why. Each step is a line of
stdout before it is done, so that whoever started it can tell which part crashed; the last line is
DONE, and how far the prefill graph diverges here, if that was measured. Otherwise the exit status is
one of those below, and stderr ends with the reason.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import numpy as np

from stem_edge.bundle.manifest import MANIFEST, TABLES, TOKENIZER, Bundle, open_bundle
from stem_edge.bundle.prefill_check import UNUSABLE, mean_divergence, probe_tokens
from stem_edge.errors import RowReadError, StemEdgeError
from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.system.child import limit_this_process

DONE = "done"
# Exit statuses; an abort on Windows is 3.
REFUSED, NO_MEMORY = 11, 12  # stderr: "ErrorClass: message"; it needed more than the limit

Say = Callable[[str], None]


def try_tokenizer(bundle: Bundle, say: Say) -> None:
    """Read it, and take some texts there and back. Raises StemEdgeError."""
    say(TOKENIZER)
    codec = TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
    say(f"texts through {TOKENIZER}")
    codec.probe()


def measure_prefill(bundle: Bundle, say: Say) -> float | None:
    """How far the prefill graph diverges here from those that decode, in nats.

    None if the report does not say how far it did where it was exported (stem_edge.bundle.prefill_check),
    or where rows cannot be read: reading them in use raises an error that says more.
    """
    ids, format = np.array(probe_tokens(bundle.manifest), np.int64), bundle.manifest.table_format
    rows: U8 | None = None
    if not len(ids):
        return None
    if format is not None:
        with contextlib.suppress(RowReadError), open_store(bundle.file(TABLES), format) as store:
            rows = store.read(store.records_of(ids))
        if rows is None:
            return None
    say("both graphs")
    return _divergence(bundle, list(ids), rows)


def _divergence(bundle: Bundle, ids: list[int], rows: U8 | None) -> float:
    from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
    from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs
    from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
    from stem_edge.runtime.rows.slots import ArraySlots

    manifest, slots, used = bundle.manifest, None, np.arange(len(ids), dtype=np.int32)
    if manifest.tables is not None and rows is not None:
        slots = ArraySlots(manifest.tables, len(ids))
        slots.write(np.arange(len(ids)), rows)
    backend = OrtBackend(manifest.model, cpu_graphs(bundle, prefill=True), slots, 1, [CPU])
    computed: list[F32] = []
    for prefill in (False, True):
        context = backend.open_context(len(ids))
        context.begin(np.array(ids), 0, prefill=prefill)
        with contextlib.suppress(NotFiniteError):
            computed.append(context.finish(used, len(ids)).copy())
    return mean_divergence(*computed) if len(computed) == 2 else UNUSABLE


def main() -> int:
    """Bundle, engine and the limits come as arguments."""
    path, engine, memory, seconds = sys.argv[1:]
    limit_this_process(int(memory), int(seconds))
    diverges = None
    try:
        _say(MANIFEST)
        bundle = open_bundle(path)
        try_tokenizer(bundle, _say)
        if engine == "onnxruntime":
            diverges = measure_prefill(bundle, _say)
    except (StemEdgeError, MemoryError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return NO_MEMORY if isinstance(error, MemoryError) else REFUSED
    _say(DONE if diverges is None else f"{DONE} {diverges:.3g}")
    return 0


def _say(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    sys.exit(main())
