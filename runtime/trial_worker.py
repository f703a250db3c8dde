"""Tries a bundle in a process of its own: python -m stem_edge.runtime.trial_worker.

Not a command for users: `stem_edge.runtime.trial` starts it, and says why. Each step is a line of
stdout before it is done, so that whoever started it can tell which part crashed; the last line is
DONE, and how far the prefill graph diverges here, if that was measured. Otherwise the exit status is
one of those below, and stderr ends with the reason.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np

from stem_edge.bundle import GGUF, MANIFEST, TABLES, TOKENIZER, Bundle, EngineName, open_bundle
from stem_edge.child import limit_this_process
from stem_edge.errors import RowReadError, StemEdgeError
from stem_edge.graph_io import graph_file
from stem_edge.onnx_check import check_graphs
from stem_edge.prefill_check import UNUSABLE, mean_divergence, probe_tokens
from stem_edge.quantize import F32, I64, U8
from stem_edge.rows import RecordLayout
from stem_edge.runtime.backend import Backend, NotFiniteError
from stem_edge.runtime.made_up import slot_ids
from stem_edge.runtime.slots import Slots
from stem_edge.runtime.store import open_store
from stem_edge.runtime.text import TextCodec

DONE = "done"
# Exit statuses; an abort on Windows is 3.
REFUSED, NO_MEMORY = 11, 12  # stderr: "ErrorClass: message"; it needed more than the limit
COMPUTED_TOKENS = 16  # and as many logits: what a prompt needs at once shows in memory
OPENED_BY: dict[EngineName, str] = {
    "onnxruntime": "stem_edge.runtime.backend_ort",
    "ggml": "stem_edge.runtime.loading_ggml",
}

Say = Callable[[str], None]


def try_tokenizer(bundle: Bundle, say: Say) -> None:
    """Read it, and take some texts there and back. Raises StemEdgeError."""
    say(TOKENIZER)
    codec = TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
    say(f"texts through {TOKENIZER}")
    codec.probe()


class Probe(NamedTuple):
    """Tokens of a bundle's report, and their records."""

    ids: I64
    rows: U8 | None  # of a dense model: None


def try_backbone(
    bundle: Bundle, engine: EngineName, cache_dir: str | None, say: Say
) -> float | None:
    """Load it as the engine does, and compute some tokens with each graph. Raises StemEdgeError.

    Returns how far the prefill graph diverges here from those that decode, in nats, if the report
    says how far it did where it was exported (stem_edge.prefill_check).
    """
    layout, manifest = bundle.manifest.tables, bundle.manifest
    probe = read_probe(bundle) if engine == "onnxruntime" else None
    ids = probe.ids if probe is not None else np.arange(_tokens(bundle))
    slots_of = np.arange(len(ids), dtype=np.int32) if probe else slot_ids(layout, len(ids))
    count = int(slots_of.max()) + 1
    if engine == "ggml":
        backend = _open_ggml(bundle, layout, count, cache_dir, say)
    else:
        backend = _open_graphs(bundle, layout, count, probe.rows if probe else None, say)
    computed: dict[bool, F32] = {}
    for prefill in sorted({False, manifest.has_prefill and engine == "onnxruntime"}):
        say(f"computing {len(ids)} tokens" + " of a prompt" * prefill)
        context = backend.open_context(len(ids))
        context.begin(ids, 0, prefill=prefill)
        with contextlib.suppress(NotFiniteError):  # rows of zeros are those of no token
            computed[prefill] = context.finish(slots_of, len(ids)).copy()
    if probe is None or False not in computed:
        return None
    return mean_divergence(computed[False], computed[True]) if True in computed else UNUSABLE


def read_probe(bundle: Bundle) -> Probe | None:
    """What both graphs are compared over; None without it, or where rows cannot be read.

    Reading them in use raises an error that says more.
    """
    ids, format = np.array(probe_tokens(bundle.manifest), np.int64), bundle.manifest.table_format
    if not len(ids):
        return None
    if format is None:
        return Probe(ids, None)
    with contextlib.suppress(RowReadError), open_store(bundle.file(TABLES), format) as store:
        return Probe(ids, store.read(store.records_of(ids)))
    return None


def _open_graphs(
    bundle: Bundle, layout: RecordLayout | None, count: int, rows: U8 | None, say: Say
) -> Backend:
    from stem_edge.runtime.backend_ort import OrtBackend
    from stem_edge.runtime.providers import CPU
    from stem_edge.runtime.slots import ArraySlots

    say("the checks of the graphs")
    check_graphs(bundle)
    slots, config = ArraySlots(layout, count) if layout is not None else None, bundle.manifest.model
    if slots is not None and rows is not None:
        slots.write(np.arange(count), rows)
    opened = OrtBackend(config, {}, slots, 1, [CPU])
    for name in bundle.manifest.graphs():
        say(graph_file(name))
        files = {name: bundle.file(graph_file(name))}
        opened.sessions |= OrtBackend(config, files, None, 1, [CPU]).sessions
    return opened


def _open_ggml(
    bundle: Bundle, layout: RecordLayout | None, count: int, cache_dir: str | None, say: Say
) -> Backend:
    from stem_edge.runtime.loading_ggml import GgmlLoader

    say(GGUF)
    loader = GgmlLoader(bundle, 1, repack=False, cache_dir=cache_dir)
    slots: Slots | None = loader.make_slots(layout, count) if layout is not None else None
    return loader.open(slots)


def _tokens(bundle: Bundle) -> int:
    config = bundle.manifest.model
    return min(COMPUTED_TOKENS, config.max_context, config.vocab_size)


def main() -> int:
    """Bundle, engine, the limits and the cache folder come as arguments."""
    path, name, memory, seconds, cache_dir = sys.argv[1:]
    engine: EngineName = "ggml" if name == "ggml" else "onnxruntime"
    import_module(
        OPENED_BY[engine]
    )  # before the first step: its time says nothing about the bundle
    limit_this_process(int(memory), int(seconds))
    try:
        _say(MANIFEST)
        bundle = open_bundle(path)
        try_tokenizer(bundle, _say)
        diverges = try_backbone(bundle, engine, cache_dir, _say)
    except (StemEdgeError, MemoryError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return NO_MEMORY if isinstance(error, MemoryError) else REFUSED
    _say(DONE if diverges is None else f"{DONE} {diverges:.3g}")
    return 0


def _say(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    sys.exit(main())
