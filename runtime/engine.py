"""The engine: token ids in, logits out, rows on their way while the backbone computes.

What a token looks up in the tables is a stem id: its own id, unless an edit says otherwise. Token
ids go to the backbone, stem ids to the prefetcher.

Data flows one way: engine -> prefetcher -> cache -> store for rows, engine -> backend for logits.
A step begins with the layers that need no rows, so that on slow flash these run while a record is
still on its way.

Backbone, cache and prefetcher know nothing of threads: whoever calls them has the engine's turn, from
the choice of slots to the end of the step that reads them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from stem_edge.bundle.prefill_check import PREFILL_FROM
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import LEAST_CHUNK, LESS_MEMORY, Backend, BackendContext
from stem_edge.runtime.rows.prefetch import Rows
from stem_edge.system.memory import raise_out_of_memory
from stem_edge.tables.lookup import RowLookup

T = TypeVar("T")
Chunk: TypeAlias = tuple[I64, I64]  # token ids and stem ids of one step
CLOSED = "this model is closed; load it again"


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
    """Runs steps. Several contexts may take turns; threads wait for each other.

    What is called raises InputError once this is closed, and in a process that was forked from the
    one that loaded it, where its threads and locks are dead; OutOfMemoryError when an allocation
    fails.
    """

    def __init__(self, backend: Backend, rows: Rows, chunk_tokens: int, *, overlap: bool) -> None:
        self._process = os.getpid()
        self.backend, self.rows, self.overlap = backend, rows, overlap
        self.planned_chunk = chunk_tokens
        # A signal handler runs in the midst of a step, in the same thread: it must not wait for it.
        self._lock = threading.RLock()
        self._busy = self._closing = False
        # A thread that is in the midst of native code when the interpreter ends would crash it.
        self._at_exit = weakref.finalize(self, _close, weakref.ref(self))

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one step at most: a chunk's distinct rows must all be in slots at once."""
        return min(self.planned_chunk, self.rows.step_tokens)

    @property
    def forked(self) -> bool:
        """Whether another process loaded this."""
        return os.getpid() != self._process

    def check_usable(self) -> None:
        """Raises InputError if this is closed or was loaded by another process."""
        if self.forked:
            raise InputError(
                f"this model was loaded in process {self._process} and cannot be used in process "
                f"{os.getpid()}, a fork of it; load it again in this one"
            )
        if self._closing:
            raise InputError(CLOSED)

    def _in_turn(self, call: Callable[[], T]) -> T:
        """What a call returns that has backbone and rows to itself.

        No context manager of ours: an interrupt at the beginning of its end would keep the lock.
        """
        self.check_usable()
        with self._lock:
            self.check_usable()
            if self._busy:
                raise InputError("a signal handler cannot generate while a step is under way; wait")
            try:
                self._busy = True
                return call()
            except MemoryError as error:
                raise_out_of_memory(error, "for this step", LESS_MEMORY)
            finally:
                self._busy = False
                if self._closing:
                    self._release()

    def open_context(self, length: int) -> Context:
        """An empty context for up to `length` tokens."""
        return self._in_turn(lambda: Context(self.backend.open_context(length)))

    def step(
        self,
        context: Context,
        token_ids: I64,
        logits: int = 1,
        following: I64 | None = None,
        *,
        stem_ids: I64 | None = None,
        prefill: bool = False,
        top: int = 0,
    ) -> F32:
        """Process ids [T], T <= chunk_tokens; logits [logits, V] of the last so many of them.

        The next step overwrites them. `stem_ids` [T]: what the tokens look up, if not their own
        rows. `following` are stem ids whose rows may be read meanwhile; `prefill` says that these
        tokens are part of a prompt. `top`: see BackendContext.finish. When it raises, the context
        stands where it stood and the step can be tried again.
        """
        looked_up = token_ids if stem_ids is None else stem_ids

        def run() -> F32:
            context.backend.begin(token_ids, context.position, prefill=prefill)
            slots = self.rows.fetch(looked_up)
            if following is not None:
                self.rows.submit(following)
            result = context.backend.finish(slots, logits, top)
            context.position += len(token_ids)
            return result

        return self._in_turn(run)

    def expect(self, stem_ids: I64) -> None:
        """Start reading the rows that are looked up next, if this engine overlaps."""
        if self.overlap:
            self._in_turn(lambda: self.rows.submit(stem_ids))

    def make(self, lookups: Sequence[RowLookup]) -> I64:
        """Stem ids int64 [n] of lookups [n], good until they are released."""
        return self._in_turn(lambda: self.rows.make(lookups))

    def release(self, stem_ids: Sequence[int]) -> None:
        """Say that ids that `make` gave are not needed any more; takes no lock."""
        self.rows.release(stem_ids)

    def process(
        self,
        context: Context,
        token_ids: Sequence[int],
        stem_ids: I64 | None = None,
        *,
        every: bool = False,
        top: int = 0,
    ) -> Iterator[F32]:
        """Process ids chunk by chunk; yields logits [1, V] of the last, or of each chunk all.

        stem_ids [T]: what they look up, if not their own rows. top: see BackendContext.finish.
        """
        if not 0 < len(token_ids) <= context.room:
            raise InputError(f"{len(token_ids)} tokens do not fit: {context.room} places are free")
        tokens = np.asarray(token_ids, np.int64)
        looked_up = tokens if stem_ids is None else stem_ids
        size = self.chunk_tokens
        chunks = list(zip(cut(tokens, size), cut(looked_up, size), strict=True))
        return (self._overlapped if self.overlap else self._plain)(context, chunks, every, top)

    def _plain(self, context: Context, chunks: list[Chunk], every: bool, top: int) -> Iterator[F32]:
        prefill = sum(len(tokens) for tokens, _ in chunks) >= PREFILL_FROM
        for number, (tokens, stem_ids) in enumerate(chunks, 1):
            wanted = len(tokens) if every else int(number == len(chunks))
            logits = self.step(context, tokens, wanted, stem_ids=stem_ids, prefill=prefill, top=top)
            if wanted:
                yield logits

    def _overlapped(
        self, context: Context, chunks: list[Chunk], every: bool, top: int
    ) -> Iterator[F32]:
        """The plain loop, but the rows of the next chunk are read while this one computes."""
        prefill = sum(len(tokens) for tokens, _ in chunks) >= PREFILL_FROM
        self.expect(chunks[0][1])
        following = [*(stem_ids for _, stem_ids in chunks[1:]), None]
        for (tokens, stem_ids), after in zip(chunks, following, strict=True):
            wanted = len(tokens) if every else int(after is None)
            logits = self.step(
                context, tokens, wanted, after, stem_ids=stem_ids, prefill=prefill, top=top
            )
            if wanted:
                yield logits

    def close(self) -> None:
        """End the prefetcher's thread, close the table store, release the backbone.

        Waits for a step under way; when called in the midst of one, by a signal handler, it leaves
        this to its end. A forked process leaves everything to the one that loaded it.
        """
        if self.forked:
            return
        self._closing = True
        with self._lock:
            if not self._busy:
                self._release()

    def __del__(self) -> None:
        # To free a backbone is to wait for its threads, which a forked process has not.
        if self.forked:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.backend))

    def _release(self) -> None:
        """May be interrupted and called again."""
        try:
            self.rows.close()
        finally:
            self.backend.close()
        self._at_exit.detach()


def _close(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
