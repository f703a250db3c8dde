"""The backbone on onnxruntime's CPU.

The graphs read and write hidden states, KV cache, rows and logits in place, so nothing is copied. A step's
inputs are token ids, slot ids and lengths, a few bytes per token; it returns the requested logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.formats import Assistant
from stem_edge.graph.kv import CACHES, KvType
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.costs import MOST
from stem_edge.runtime.backends.onnxruntime.bound_graphs import BoundGraphs
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import (
    Graphs,
    LaterSessions,
    Loaded,
    Rows,
    Sessions,
    from_numpy,
    open_sessions,
)
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.system.memory import give_back_freed_blocks, return_freed_memory

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import Drafter
    from stem_edge.runtime.backends.onnxruntime.places import OrtPlaces

# Freed blocks to reuse for a layer's keys as float32, if they are int8: new pages make 4,000 tokens 1.4 times as slow.
WIDENED_NBYTES = 8 << 20


class OrtBackend:
    """The backend on onnxruntime's CPU; see Backend. Raises BackendError, OutOfMemoryError.

    graphs: name (graph/names.py) -> graph. apart: graphs for steps of 2, 4 or 8 tokens, in which
    each token gets the same bits as in a step of its own. These graphs, and graphs that only
    prompts need, are opened at first use. opened: called when graphs have been opened. sparing:
    open graphs in less memory, but more time. assistant: the bundle's draft model, whose graph is
    in `graphs`.
    """

    assistant: Assistant | None = None

    def __init__(
        self,
        config: ModelConfig,
        graphs: Graphs,
        slots: ArraySlots | None,
        threads: int,
        kv: KvType,
        apart: Graphs | None = None,
        opened: Callable[[], None] = lambda: None,
        rows: Rows = "",
        sparing: bool = False,
    ) -> None:
        # With biases or several streams, onnxruntime's optimization fuses operators, which changes the rounding.
        as_built = not config.biases and config.streams == 1

        def opener(chosen: Graphs) -> Sessions:
            whole = bool(config.ranges)
            sessions = open_sessions(
                chosen, threads, whole_steps=whole, as_built=as_built, sparing=sparing
            )
            if kv == "int8" and not sparing:
                give_back_freed_blocks(WIDENED_NBYTES)
            opened()
            return sessions

        prompts = {name: graphs[name] for name in graphs if name in only_prompts(graphs)}
        later: dict[str, Graphs] = {name: {name: graph} for name, graph in (apart or {}).items()}
        later |= {io.PREFILL: prompts} if prompts else {}
        self.loaded = Loaded(
            config,
            slots={} if slots is None else {n: from_numpy(a) for n, a in slots.inputs().items()},
            sessions=opener({n: graph for n, graph in graphs.items() if n not in prompts}),
            kv=CACHES[kv],
            later=LaterSessions(later, opener),
            rows=rows,
        )

    @cached_property
    def graphs(self) -> BoundGraphs:
        return BoundGraphs(self.loaded)

    def open_context(self, length: int) -> OrtContext:
        self.graphs.lengthen(length)
        return OrtContext(self.loaded, length)

    def open_places(self, size: int, length: int) -> OrtPlaces:
        from stem_edge.runtime.backends.onnxruntime.places import OrtPlaces  # for several sequences

        self.graphs.lengthen(length)
        return OrtPlaces(self.loaded, size, length)

    def open_drafter(self, context: OrtContext) -> Drafter | None:
        if self.assistant is None:
            return None
        from stem_edge.runtime.backends.onnxruntime.assistant import OrtDrafter

        return OrtDrafter(self.assistant, self.loaded, self.graphs.ropes, context).draft

    def begin(
        self,
        contexts: Sequence[OrtContext],
        token_ids: I64,
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        (sequences, count), graphs = token_ids.shape, self.graphs
        dropped = [
            context.make_room(position, count)
            for context, position in zip(contexts, positions, strict=True)
        ]
        if max(count, graphs.shape.tokens) > MOST:  # other steps free too little
            return_freed_memory()  # otherwise a prompt chunk's activations stay with this process
        (kv, first), padded = contexts[0].place, False
        if kv.pads and count == 1 and sequences % 2 == 1:
            # A step of some contexts alone, as after an error, must not overwrite the context behind them.
            padded = first + sequences == kv.taken
        graphs.begin(contexts, token_ids, positions, dropped, padded, prefill=prefill, apart=apart)

    def finish(self, slot_ids: I32, logits: int) -> F32:
        return self.graphs.finish(slot_ids, logits)

    def close(self) -> None:
        self.__dict__.pop("graphs", None)
        self.loaded.close()


def only_prompts(graphs: Collection[str]) -> set[str]:
    """Return the names of the graphs that only prompts need. graphs: names of all graphs of a backbone."""
    if io.STEP in graphs:
        return {io.PREFILL, io.REST, io.HEAD}
    return set() if {io.EARLY, io.LATE}.isdisjoint(graphs) else {io.PREFILL}
