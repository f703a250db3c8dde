"""Tries a bundle in a process of its own: python -m stem_edge.runtime.trial_worker.

Not a command for users: `stem_edge.runtime.trial` starts it, and says why. Each step is a line of
stdout before it is done, so that whoever started it can tell which part crashed; the last line is
DONE. Otherwise the exit status is one of those below, and stderr ends with the reason.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module

import numpy as np

from stem_edge.bundle import GGUF, MANIFEST, TOKENIZER, Bundle, EngineName, open_bundle
from stem_edge.child import limit_this_process
from stem_edge.errors import StemEdgeError
from stem_edge.graph_io import graph_file
from stem_edge.onnx_check import check_graphs
from stem_edge.rows import RecordLayout
from stem_edge.runtime.backend import Backend, NotFiniteError
from stem_edge.runtime.made_up import slot_ids
from stem_edge.runtime.slots import Slots
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


def try_backbone(bundle: Bundle, engine: EngineName, cache_dir: str | None, say: Say) -> None:
    """Load it as the engine does, and compute some tokens with each graph. Raises StemEdgeError."""
    layout, count = bundle.manifest.tables, _tokens(bundle)
    slots = slot_ids(layout, count)
    slots_count = int(slots.max()) + 1
    if engine == "ggml":
        backend = _open_ggml(bundle, layout, slots_count, cache_dir, say)
    else:
        backend = _open_graphs(bundle, layout, slots_count, say)
    for prefill in sorted({False, bundle.manifest.has_prefill and engine == "onnxruntime"}):
        say(f"computing {count} tokens" + " of a prompt" * prefill)
        context = backend.open_context(count)
        context.begin(np.arange(count), 0, prefill=prefill)
        with contextlib.suppress(NotFiniteError):  # rows of zeros are those of no token
            context.finish(slots, count)


def _open_graphs(bundle: Bundle, layout: RecordLayout | None, count: int, say: Say) -> Backend:
    from stem_edge.runtime.backend_ort import OrtBackend
    from stem_edge.runtime.providers import CPU
    from stem_edge.runtime.slots import ArraySlots

    say("the checks of the graphs")
    check_graphs(bundle)
    slots, config = ArraySlots(layout, count) if layout is not None else None, bundle.manifest.model
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
        try_backbone(bundle, engine, cache_dir, _say)
    except (StemEdgeError, MemoryError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return NO_MEMORY if isinstance(error, MemoryError) else REFUSED
    _say(DONE)
    return 0


def _say(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    sys.exit(main())
