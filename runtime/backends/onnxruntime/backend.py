"""The backbone on onnxruntime's CPU.

Hidden states, KV cache, rows and logits lie where the graphs compute, so nothing is copied. A step takes
ids, slots and lengths, a few bytes a token, and returns the logits of the tokens asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.kv import CACHES, KvType
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import (
    Graphs,
    LaterSessions,
    Loaded,
    Ropes,
    Rows,
    Sessions,
    open_sessions,
    slots_in_arrays,
)
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.rows.slots import Slots


class OrtBackend:
    """The graphs for the CPU, by their names. Raises BackendError, OutOfMemoryError.

    kv: type of keys and values in the graphs. apart: graphs of steps of several tokens. They are opened
    when one is first needed, and so are those that only prompts need. opened: called once graphs are open.
    sparing: take little memory for that.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Graphs,
        slots: Slots | None,
        threads: int,
        kv: KvType = "fp32",
        apart: Graphs | None = None,
        opened: Callable[[], None] = lambda: None,
        rows: Rows = "",
        sparing: bool = False,
    ) -> None:
        # Otherwise, onnxruntime adds biases within products, and joins factors, which rounds otherwise.
        as_built = not config.biases and config.streams == 1

        def opener(chosen: Graphs) -> Sessions:
            sessions = open_sessions(
                chosen,
                threads,
                [CPU],
                whole_steps=bool(config.ranges),
                as_built=as_built,
                sparing=sparing,
            )
            opened()
            return sessions

        prompts = {name: graphs[name] for name in graphs if name in only_prompts(graphs)}
        later = {name: {name: graph} for name, graph in (apart or {}).items()}
        later |= {io.PREFILL: prompts} if prompts else {}
        self.loaded = Loaded(
            config,
            slots=slots_in_arrays(slots),
            sessions=opener({n: graph for n, graph in graphs.items() if n not in prompts}),
            kv=CACHES[kv],
            ropes=Ropes(config),
            later=LaterSessions(later, opener),
            rows=rows,
        )

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens, with all memory that it will need.

        Raises OutOfMemoryError.
        """
        return OrtContext(self.loaded, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch. Raises OutOfMemoryError."""
        from stem_edge.runtime.backends.onnxruntime.batch import OrtBatch  # for several sequences

        return OrtBatch(self.loaded, size, length)

    def close(self) -> None:
        """Release the sessions."""
        self.loaded.close()


def only_prompts(graphs: Collection[str]) -> set[str]:
    """Return the graphs without which tokens can be decoded."""
    if io.STEP in graphs:
        return {io.PREFILL, io.REST, io.HEAD}
    return set() if {io.EARLY, io.LATE}.isdisjoint(graphs) else {io.PREFILL}
