"""The engine: token ids in, logits out, rows on their way while the backbone computes.

Data flows one way: engine -> prefetcher -> cache -> store for rows, engine -> backend for logits.
A step begins with the layers that need no rows, so that on slow flash these run while a record is
still on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from stem_edge.errors import InputError
from stem_edge.quantize import F32
from stem_edge.runtime.backend import Backend, BackendContext
from stem_edge.runtime.cache import I64
from stem_edge.runtime.prefetch import Rows

# From so many tokens on, the graph for prompts is the faster one wherever it was measured. It is
# chosen by the whole prompt and not by the chunk, so that the size of chunks changes no token.
PREFILL_FROM = 8
# Shorter chunks could not keep the rule of `cut`.
LEAST_CHUNK = 4


def cut(token_ids: I64, size: int) -> list[I64]:
    """Chunks of up to `size` ids, which give the same logits whatever the size, from 4 on.

    Kernels take tokens in pairs and round one that is left alone in another way. So chunks are
    even, and the last one has more than one token unless the prompt has not.
    """
    if size >= LEAST_CHUNK:
        size -= size % 2
    starts = list(range(0, len(token_ids), size))
    if size >= LEAST_CHUNK and len(starts) > 1 and starts[-1] == len(token_ids) - 1:
        starts[-1] -= 2
    return [token_ids[at:end] for at, end in pairwise([*starts, len(token_ids)])]


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

    def __init__(self, backend: Backend, rows: Rows, chunk_tokens: int, *, overlap: bool) -> None:
        self.backend, self.rows, self.overlap = backend, rows, overlap
        # A chunk's distinct rows must all be in slots at once.
        self.chunk_tokens = min(chunk_tokens, rows.step_tokens)
        self._lock = threading.Lock()

    def open_context(self, length: int) -> Context:
        """An empty context for up to `length` tokens."""
        return Context(self.backend.open_context(length))

    def step(
        self,
        context: Context,
        token_ids: I64,
        logits: int = 1,
        following: I64 | None = None,
        *,
        prefill: bool = False,
    ) -> F32:
        """Process ids [T], T <= chunk_tokens; logits [logits, V] of the last so many of them.

        The next step overwrites them. `following` are ids whose rows may be read meanwhile;
        `prefill` says that these are part of a prompt. When it raises, the context stands where it
        stood and the step can be tried again.
        """
        with self._lock:
            context.backend.begin(token_ids, context.position, prefill=prefill)
            slots = self.rows.fetch(token_ids)
            if following is not None:
                self.rows.submit(following)
            result = context.backend.finish(slots, logits)
            context.position += len(token_ids)
            return result

    def expect(self, token_ids: I64) -> None:
        """Start reading the rows of the tokens that come next, if this engine overlaps."""
        if self.overlap:
            with self._lock:
                self.rows.submit(token_ids)

    def process(
        self, context: Context, token_ids: Sequence[int], *, every: bool = False
    ) -> Iterator[F32]:
        """Process ids chunk by chunk; yields logits [1, V] of the last, or of each chunk all."""
        if not 0 < len(token_ids) <= context.room:
            raise InputError(f"{len(token_ids)} tokens do not fit: {context.room} places are free")
        chunks = cut(np.asarray(token_ids, np.int64), self.chunk_tokens)
        return (self._overlapped if self.overlap else self._plain)(context, chunks, every)

    def _plain(self, context: Context, chunks: list[I64], every: bool) -> Iterator[F32]:
        prefill = sum(map(len, chunks)) >= PREFILL_FROM
        for chunk in chunks:
            wanted = len(chunk) if every else int(chunk is chunks[-1])
            logits = self.step(context, chunk, wanted, prefill=prefill)
            if wanted:
                yield logits

    def _overlapped(self, context: Context, chunks: list[I64], every: bool) -> Iterator[F32]:
        """The plain loop, but the rows of the next chunk are read while this one computes."""
        prefill = sum(map(len, chunks)) >= PREFILL_FROM
        self.expect(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            wanted = len(chunk) if every else int(following is None)
            logits = self.step(context, chunk, wanted, following, prefill=prefill)
            if wanted:
                yield logits

    def close(self) -> None:
        """End the prefetcher's thread, close the table store, release the backbone."""
        self.rows.close()
        self.backend.close()
