"""Drafts tokens on the CPU with a model's assistant (a draft model that reads the model's keys and values)."""

from __future__ import annotations

import numpy as np

from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.formats import Assistant
from stem_edge.graph.kv import KvType
from stem_edge.graph.special.assistant import drafting, lenders, scored
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.costs import DAMAGED
from stem_edge.runtime.backends.onnxruntime.bound_graphs import Lengths
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, RopeArrays, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers.graphs import (
    check_weights,
    format_of,
    graph_source,
)
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    GraphSource,
    onnxruntime_errors,
)


def source(bundle: Bundle, assistant: Assistant, kv: KvType) -> GraphSource:
    """Return the graph of the assistant (draft model), which reads its own and the main model's weight files."""
    graph, plan = drafting(assistant, bundle.manifest.model, format_of(bundle), kv)
    check_weights(bundle, plan)
    return graph_source(bundle, io.ASSISTANT, graph)


class OrtDrafter:
    """Drafts tokens for one context; the assistant's graph reads the context's keys and values in place."""

    def __init__(
        self, assistant: Assistant, loaded: Loaded, ropes: RopeArrays, context: OrtContext
    ) -> None:
        self._context, dim = context, loaded.config.dim
        self._embed = BoundSession(loaded.sessions[io.EMBED])
        self._graph = BoundSession(loaded.sessions[io.ASSISTANT])
        self._ropes, caches = ropes, context.own.part(0, 1)
        self._graph.bind(caches)
        self._graph.bind(self._ropes.values())
        # Kernels of quantized caches demand outputs of each layer, although they write nothing here.
        for number, lender in lenders(assistant, loaded.config).items():
            lent = {name: f"{name}{lender}" for name in (io.KEYS, io.VALUES)}
            self._graph.bind({f"{io.NEW}{n}.{number}": caches[n] for n in lent.values()})
        self._token, self._position = np.zeros((2, 1, 1), np.int64)
        self._state = np.empty((1, 1, dim), np.float32)
        self._next = np.empty((1, 1, dim), np.float32)
        self._ids = np.arange(scored(assistant), dtype=np.int32)[None]
        self._scores = np.empty((1, *self._ids.shape), np.float32)
        embedded = from_numpy(np.empty((1, 1, dim), np.float32))
        self._embed.feed({io.TOKEN_IDS: self._token})
        self._embed.bind({io.NEW + io.HIDDEN: embedded})
        self._graph.feed({io.POSITIONS: self._position, io.STATE: self._state})
        self._lengths = {prefix: Lengths(1) for prefix in ("", io.WINDOW)}
        for prefix, lengths in self._lengths.items():
            self._graph.feed(lengths.inputs(prefix))
        outputs = {io.NEW + io.STATE: self._next, io.LOGITS: self._scores, io.SCORED: self._ids}
        self._graph.bind({io.EMBEDDED: embedded} | {n: from_numpy(a) for n, a in outputs.items()})

    def draft(self, token_id: int, position: int, count: int) -> list[int]:
        window = self._context.dropped
        self._lengths[""].write([position])
        self._lengths[io.WINDOW].write([position - window])
        self._ropes.fill(position + 1)
        self._position[...], self._token[...] = position, token_id
        self._state[...] = self._state_before(position)
        drafts = list[int]()
        with onnxruntime_errors(f"for the assistant at position {position}"):
            while len(drafts) < count:
                self._embed.run()
                self._graph.run()
                drafts.append(int(self._ids[0, self._scores.argmax()]))
                # Ids are data of a file. The embedding's graph would take -1 for the last row.
                if drafts[-1] < 0:
                    raise BackendError(f"the assistant drafts token {drafts[-1]}; {DAMAGED}")
                self._token[...], self._state[...] = drafts[-1], self._next
        if not np.isfinite(self._next).all():
            raise BackendError(
                f"the state of the assistant at position {position} is not finite; {DAMAGED}"
            )
        return drafts

    def _state_before(self, position: int) -> F32:
        """Return the hidden state [dim] of the token before a position.

        Raises BackendError unless the last step gave logits of this token.
        """
        states = self._context.results.get(io.STATES)
        place = position - 1 - self._context.first_result
        if states is None or not 0 <= place < states.shape[1]:
            raise BackendError(
                f"the last step left no state of the token before position {position}"
            )
        state: F32 = states[0, place]
        return state
