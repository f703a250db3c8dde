"""The engine: token ids in, logits out, rows on their way while the backbone computes.

Data flows one way: engine -> prefetcher -> cache -> store for rows, engine -> backend for logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from stem_edge.errors import InputError
from stem_edge.quantize import F32
from stem_edge.runtime.backend import Backend, BackendContext
from stem_edge.runtime.cache import I64
from stem_edge.runtime.prefetch import Prefetcher


class Context:
    """One generation's state: its KV cache and how much of it is filled."""

    def __init__(self, backend: BackendContext) -> None:
        self.backend = backend
        self.position = 0  # tokens processed

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.backend.length - self.position


class Engine:
    """Runs steps. Several contexts may take turns; threads wait for each other."""

    def __init__(
        self, backend: Backend, rows: Prefetcher, chunk_tokens: int, *, overlap: bool
    ) -> None:
        self.backend, self.rows, self.overlap = backend, rows, overlap
        # A chunk's distinct rows must all be in slots at once.
        self.chunk_tokens = min(chunk_tokens, rows.cache.slots)
        self._lock = threading.Lock()

    def open_context(self, length: int) -> Context:
        """An empty context for up to `length` tokens."""
        return Context(self.backend.open_context(length))

    def step(
        self, context: Context, token_ids: I64, logits_from: int, following: I64 | None = None
    ) -> F32:
        """Process ids [T], T <= chunk_tokens; logits [T - logits_from, V], overwritten by the next.

        `following` are ids whose rows may be read meanwhile. When it raises, the context stands
        where it stood and the step can be tried again.
        """
        with self._lock:
            slots = self.rows.fetch(token_ids)
            if following is not None:
                self.rows.submit(following)
            logits = context.backend.run(token_ids, slots, context.position, logits_from)
            context.position += len(token_ids)
            return logits

    def expect(self, token_ids: I64) -> None:
        """Start reading the rows of the tokens that come next, if this engine overlaps."""
        if self.overlap:
            with self._lock:
                self.rows.submit(token_ids)

    def process(
        self, context: Context, token_ids: Sequence[int], *, every: bool = False
    ) -> Iterator[F32]:
        """Process ids chunk by chunk; logits [1, V] of each chunk's last token, or of every one."""
        if not 0 < len(token_ids) <= context.room:
            raise InputError(f"{len(token_ids)} tokens do not fit: {context.room} places are free")
        ids, size = np.asarray(token_ids, np.int64), self.chunk_tokens
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        return (self._overlapped if self.overlap else self._plain)(context, chunks, every)

    def _plain(self, context: Context, chunks: list[I64], every: bool) -> Iterator[F32]:
        for chunk in chunks:
            yield self.step(context, chunk, 0 if every else len(chunk) - 1)

    def _overlapped(self, context: Context, chunks: list[I64], every: bool) -> Iterator[F32]:
        """The plain loop, but the rows of the next chunk are read while this one computes."""
        self.expect(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            yield self.step(context, chunk, 0 if every else len(chunk) - 1, following)

    def close(self) -> None:
        """End the prefetcher's thread, close the table store, release the backbone."""
        self.rows.close()
        self.rows.store.close()
        self.backend.close()
