"""Worker process that tries a bundle's tokenizer and measures its prefill graph.

Not a command for users: stem_edge.runtime.first_load.trial starts it with python -m, and explains
why. The name of each step goes to stdout before it, so that the parent can tell which one crashed.
The last line is DONE, and the divergence of the prefill graph if it was measured. On failure the
exit status is one of those below, and the last line of stderr gives the reason.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import numpy as np

from stem_edge.bundle.manifest import MANIFEST, TABLES, TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.prefill_check import UNUSABLE, mean_divergence, probe_tokens
from stem_edge.errors import RowReadError, StemEdgeError
from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.system.child import limit_this_process

DONE = "done"
# Exit statuses, which must differ from those of Python and of an abort on Windows (1, 2 and 3).
REFUSED, NO_MEMORY = 11, 12  # stderr: "ErrorClass: message"; more memory needed than the limit

Say = Callable[[str], None]


def try_tokenizer(bundle: Bundle, say: Say) -> None:
    """Read the tokenizer, and encode and decode some texts. Raises StemEdgeError."""
    say(TOKENIZER)
    codec = TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
    say(f"texts through {TOKENIZER}")
    codec.probe()


def measure_prefill(bundle: Bundle, say: Say) -> float | None:
    """Return the divergence of the prefill graph from those that decode here, in nats.

    None if the bundle has no probe of it (stem_edge.bundle.prefill_check), or if rows cannot be
    read, because reading them in use raises a better error. Of tables elsewhere, that is raised here:
    they may be back soon, and the result would stay.
    """
    ids, format = np.array(probe_tokens(bundle.manifest), np.int64), bundle.manifest.table_format
    rows: U8 | None = None
    if not len(ids):
        return None
    if format is not None:
        root, url = bundle.file(TABLES), bundle.tables
        passes = (RowReadError,) if url is None else ()
        with contextlib.suppress(*passes), open_store(root, format, url=url) as store:
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
    """Run with the arguments BUNDLE ENGINE MEMORY_NBYTES CPU_SECONDS [TABLES]."""
    path, engine, memory, seconds, *tables = sys.argv[1:]
    limit_this_process(int(memory), int(seconds))
    diverges = None
    try:
        _say(MANIFEST)
        bundle = open_bundle(path, *tables)
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
