"""The prefix cache in memory: contexts of earlier calls, for calls that begin with the same tokens.

A call takes a context out and gives it back when it ends, so that no two calls share a context.
`give_back` takes no lock: a generator calls it when it is garbage-collected, which can interrupt any
code. Decoded tokens are not reused, because they were not computed as a prompt.

The lock guards the lists alone: code that holds it calls no engine, and reads and writes no files. So a
signal handler may wait for this lock even during a step, while other threads wait for the engine.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.backends.context import NO_PROMPT, Context, PromptKey
from stem_edge.runtime.engine import Engine
from stem_edge.tables.rows import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.prefixes.folder import PrefixFolder

# Each cached context takes address space for a full context, and a little memory besides its KV cache.
MOST_KEPT = 8


class Prefixes:
    """The contexts (KV caches) of a model's running calls, and cached contexts, oldest first.

    length: most tokens of a context. nbytes_of: number of tokens -> bytes of their keys and values. limit: most bytes
    of the KV caches of all contexts and batches. Cached contexts are evicted first, so only concurrent calls can exceed
    the limit. keeps: True to cache contexts. folder: evicted contexts are saved there; `close` saves all cached contexts.
    """

    def __init__(
        self,
        engine: Engine,
        length: int,
        nbytes_of: Callable[[int], int],
        limit: int,
        folder: PrefixFolder | None,
        *,
        keeps: bool,
    ) -> None:
        self.nbytes_of, self.limit = nbytes_of, limit
        self._engine, self._length, self._folder, self._keeps = engine, length, folder, keeps
        self._lock = threading.RLock()  # re-entrant, for a signal handler that generates
        self._kept: list[Context] = []
        # Weak, so that a call that is interrupted before it has its context leaves nothing behind.
        # Replaced, never changed: a signal handler may add to it while it is read.
        self._lent = frozenset[weakref.ref[Context]]()
        self._ended = deque[Context]()  # contexts of ended calls, to be cached

    def take(
        self,
        token_ids: Sequence[int],
        lookups: Mapping[int, RowLookup],
        length: int,
    ) -> Context:
        """Return a context for up to `length` tokens. It may already have the prompt's first tokens.

        Its `position` is their number. Call `give_back` later.
        """
        if not self._keeps:
            return self.empty(length)
        prompt = PromptKey(token_ids, lookups, self._engine.starts(len(token_ids)))
        return self._take(prompt, length)

    def empty(self, length: int) -> Context:
        """Return an empty context that is never cached. Reserves memory for all its tokens now."""
        return self._register(self._opened(NO_PROMPT, length), length)

    def fits(self, nbytes: int) -> bool:
        """True if `nbytes` more bytes are within the limit once all cached contexts are dropped.

        Running calls are counted as if they had filled their contexts.
        """
        with self._lock:
            self._collect()
            most = sum(prefix.nbytes + prefix.growth for prefix in self._running())
            return most + nbytes <= self.limit

    @property
    def nbytes(self) -> int:
        """Bytes of the KV caches of running calls and of cached contexts."""
        with self._lock:
            self._collect()
            return sum(prefix.nbytes for prefix in (*self._kept, *self._running()))

    def make_room(self, context: Context, tokens: int) -> None:
        """Drop cached contexts until `context` can grow by `tokens` tokens."""
        with self._lock:
            self._collect()
            context.reserve(min(context.position + tokens, context.length))
            dropped = self._evict()
        self._write(dropped)

    def forget(self) -> None:
        with self._lock:
            self._collect()
            self._kept.clear()

    def close(self) -> None:
        """Save cached contexts to the folder, if there is one, and drop them."""
        with self._lock:
            self._collect()
            self._keeps = False
            dropped, self._kept = self._kept[::-1], []
        self._write(dropped)

    def give_back(self, prefix: Context, *, keep: bool = True) -> None:
        """Give back a context when its call ends. Takes no lock. keep: False to drop it."""
        if keep and self._keeps and not prefix.joined:  # not closed meanwhile
            self._ended.append(prefix)

    def _take(self, prompt: PromptKey, length: int) -> Context:
        best, tokens = self._borrowed(prompt)
        context, saved = best or self._opened(prompt, self._length), None
        if self._folder is not None:
            resumes = context.backend.resumes(len(prompt.token_ids))
            saved = self._folder.find(prompt, resumes, tokens)
        if best is not None and saved is not None:
            self.give_back(best)
            best, context = None, self._opened(prompt, self._length)
        if best is not None:
            best.rewind(tokens)  # first, because another thread may copy from here
            best.prompt = prompt
        self._register(context, length)
        if saved is not None and self._folder is not None:
            path, context.position = saved
            if not self._folder.read(path, context.position, context.backend):
                del context
                return self._take(prompt, length)  # which no longer finds this file
        elif best is None:
            self._copy(context)
        return context

    def _copy(self, context: Context) -> None:
        """Fill `context` from the other context that shares the most prompt tokens with it."""
        with self._lock:
            others = [one for one in (*self._kept, *self._running()) if one is not context]
        if others:  # while no call computes
            self._engine.in_turn(lambda: context.copy(*_best(others, context.prompt)))

    def _borrowed(self, prompt: PromptKey) -> tuple[Context | None, int]:
        """Remove and return the cached context with the most tokens of a prompt, and their number.

        The context is None if its tokens should be copied, because it stays cached or a running
        call uses it. The number then says how many can be copied.
        """
        with self._lock:
            self._collect()
            best, tokens = _best(self._kept, prompt)
            if best is None:
                return None, _best(self._running(), prompt)[1]
            self._kept.remove(best)
            if self._copies(best, tokens, prompt):
                self._kept.append(best)  # used last, so that it stays
                return None, tokens
            self._lent |= {weakref.ref(best)}
            return best, tokens

    def _register(self, context: Context, length: int) -> Context:
        """Record that a call uses `context` (`length` tokens); evict cached contexts to fit it."""
        context.length = length
        context.reserve(len(context.prompt.token_ids) or length)
        with self._lock:
            self._collect()
            self._lent |= {weakref.ref(context)}
            dropped = self._evict()
        self._write(dropped)
        return context

    def _copies(self, best: Context, tokens: int, prompt: PromptKey) -> bool:
        """True if a prompt should copy the first `tokens` tokens of `best`, so that `best` stays cached."""
        rest, backend = best.computed - tokens, best.backend
        more = best.nbytes + backend.nbytes_of(len(prompt.token_ids) + STEP_TOKENS)
        worth = rest > min(tokens, STEP_TOKENS) and self.fits(more)
        return worth and bool(backend.kept(tokens))

    def _opened(self, prompt: PromptKey, length: int) -> Context:
        try:
            return self._engine.open_context(length, prompt)
        except OutOfMemoryError:
            if not self._kept:
                raise
            self.forget()
            return self._engine.open_context(length, prompt)

    def _running(self) -> list[Context]:
        return [context for lent in self._lent if (context := lent()) is not None]

    def _collect(self) -> None:
        """Move contexts of ended calls to the cache."""
        while self._ended:
            prefix = self._ended.popleft()
            self._lent = frozenset(one for one in self._lent if one() not in (prefix, None))
            if prefix.useful:
                prefix.settle()
                self._kept.append(prefix)

    def _evict(self) -> list[Context]:
        """Remove and return the oldest cached contexts, until the rest is within the limit."""
        dropped = list[Context]()
        while len(self._kept) > MOST_KEPT or (self._kept and self.nbytes > self.limit):
            dropped.append(self._kept.pop(0))
        return dropped

    def _write(self, dropped: list[Context]) -> None:
        while dropped:
            prefix = dropped.pop(0)
            if self._folder is not None:
                self._folder.write(prefix.prompt, prefix.computed, prefix.backend)


def _best(contexts: Sequence[Context], prompt: PromptKey) -> tuple[Context | None, int]:
    """Return the context with most reusable tokens of a prompt, and their number, or (None, 0)."""
    if not contexts:
        return None, 0
    from stem_edge.runtime.prefixes.reuse import reusable  # where anything is cached

    def tokens(one: Context) -> int:
        resumes = one.backend.resumes(len(prompt.token_ids))
        return reusable(one.prompt, one.computed, prompt, resumes, one.backend.settled)

    found = max(((one, tokens(one)) for one in contexts), key=itemgetter(1))
    return found if found[1] else (None, 0)
