"""Contexts of earlier calls, kept in memory for later ones that begin with the same tokens.

A call takes a context out and gives it back when it ends, so that no two calls share one. Giving
back takes no lock, because a generator does so when it is collected, which may be in the midst of
anything. What decoding added is not reused, because it was not computed as a prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.engine import Context, Engine
from stem_edge.runtime.prefixes.file import PrefixFile, Saved, UnusableError, write_prefix
from stem_edge.runtime.prefixes.folder import LEAST_TOKENS, PrefixFolder, restore, saved_of
from stem_edge.runtime.prefixes.reuse import Prompt, reusable
from stem_edge.tables.lookup import RowLookup

# Each takes addresses for a full context, and a little memory beside its KV cache.
MOST_KEPT = 8


class Prefix:
    """A context with the prompt that it computed, or is computing."""

    def __init__(self, prompt: Prompt, context: Context) -> None:
        self.prompt, self.context = prompt, context
        self.nbytes, self._reserved = (
            0,
            0,
        )  # of its KV cache, now or before long; for how many tokens
        self.reserve(context.position)

    @property
    def computed(self) -> int:
        """Tokens of the prompt whose keys and values are there, as far as a prompt's."""
        return min(self.context.position, len(self.prompt.token_ids))

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens another prompt can take over from this context."""
        backend = self.context.backend
        resumes = backend.resumes(len(prompt.token_ids))
        return reusable(self.prompt, self.computed, prompt, resumes, backend.settled)

    def reserve(self, tokens: int) -> None:
        """Count the memory that the context takes once it has so many tokens.

        In steps, because memory is provided in pages, which have the tokens of one head.
        """
        if tokens > self._reserved:
            self._reserved = -(-tokens // STEP_TOKENS) * STEP_TOKENS
            backend = self.context.backend
            self.nbytes = backend.nbytes_of(min(self._reserved, backend.length))


class Prefixes:
    """Contexts for the calls of one model, and those of earlier calls, oldest first.

    length: tokens of a context. limit: bytes of the KV caches of all of them; kept ones give way, so
    that only calls at the same time exceed it. None: no context is kept. folder: gets contexts that
    give way, and those that are there at the end.
    """

    def __init__(
        self, engine: Engine, length: int, limit: int | None, folder: PrefixFolder | None = None
    ) -> None:
        self._engine, self._length, self._limit, self._folder = engine, length, limit, folder
        self._lock = threading.RLock()  # re-entrant, for a signal handler that generates
        self._kept: list[Prefix] = []
        self._lent: list[Prefix] = []
        self._ended: deque[tuple[Prefix, bool]] = deque()  # and whether to keep it

    @contextmanager
    def lent(
        self, token_ids: Sequence[int], lookups: Mapping[int, RowLookup], length: int
    ) -> Iterator[Context]:
        """Lend a context for up to `length` tokens; its position is what it has of the prompt.

        A call that is interrupted leaves the context as its last step did, so it is kept.
        """
        if self._limit is None:
            yield self._engine.open_context(length)
            return
        prompt = Prompt(token_ids, lookups, self._engine.starts(len(token_ids)))
        prefix, keep = self._take(prompt, length), True
        try:
            yield prefix.context
        except Exception:
            keep = False
            raise
        finally:
            if self._limit is not None:  # None: closed meanwhile
                self._ended.append((prefix, keep))

    def make_room(self, context: Context) -> None:
        """Let kept contexts give way to one that grows. Called before each new token."""
        if not self._kept:
            return
        with self._lock:
            for prefix in self._lent:
                if prefix.context is context:
                    prefix.reserve(context.position + 1)
            self._evict()

    def forget(self) -> None:
        """Drop all kept contexts."""
        with self._lock:
            self._collect()
            self._kept.clear()

    def close(self) -> None:
        """Write kept contexts to the folder, if there is one, and drop them."""
        with self._lock:
            self._collect()
            self._limit = None
            while self._kept:
                self._drop(self._kept.pop())

    def save(self, path: Path, token_ids: Sequence[int], messages: str, fingerprint: str) -> None:
        """Write messages with what is kept of their token ids. Raises OSError."""
        prompt, found = Prompt(token_ids, {}, self._engine.starts(len(token_ids))), None
        with self._lock:
            self._collect()
            if best := max(self._kept, key=lambda prefix: prefix.reusable(prompt), default=None):
                tokens, backend = best.reusable(prompt), best.context.backend
                found = saved_of(best.prompt, tokens, fingerprint, backend)
            saved, arrays = found or (Saved(fingerprint, [], []), [])
            write_prefix(path, replace(saved, messages=messages), arrays)

    def load(self, path: Path, fingerprint: str) -> str:
        """Read messages, and keep the keys and values beside them if they are of use here.

        Raises UnusableError, OSError.
        """
        with PrefixFile(path) as file, self._lock:
            saved = file.saved
            if file.own and saved.token_ids and saved.fingerprint == fingerprint and self._limit:
                context = self._opened()
                with suppress(UnusableError):
                    restore(file, len(saved.token_ids), context.backend)
                    context.position = len(saved.token_ids)
                prefix = Prefix(Prompt(saved.token_ids, {}, saved.starts), context)
                self._ended.append((prefix, True))
                self._lent.append(prefix)
            file.check()
        return saved.messages

    def _drop(self, prefix: Prefix) -> None:
        if self._folder is not None:
            self._folder.write(prefix.prompt, prefix.computed, prefix.context.backend)

    def _take(self, prompt: Prompt, length: int) -> Prefix:
        with self._lock:
            self._collect()
            best = max(self._kept, key=lambda prefix: prefix.reusable(prompt), default=None)
            tokens = best.reusable(prompt) if best is not None else 0
            context = None
            if (found := self._read(prompt, tokens)) is not None:
                context = found
            elif best is not None and tokens:
                context = self._continued(best, tokens, len(prompt.token_ids))
            prefix = Prefix(prompt, context or self._opened())
            prefix.context.length = length
            prefix.reserve(len(prompt.token_ids))
            self._lent.append(prefix)
            self._evict()
            return prefix

    def _continued(self, best: Prefix, tokens: int, prompt: int) -> Context:
        """Return a context with the first `tokens` of a kept one: this one, or a copy.

        Copied if the rest is worth keeping and there is memory for both.
        """
        rest, source = best.computed - tokens, best.context
        both = best.nbytes + source.backend.nbytes_of(prompt + STEP_TOKENS)
        both += sum(prefix.nbytes for prefix in self._lent)
        arrays = source.backend.kept(tokens)
        if arrays and rest > min(tokens, STEP_TOKENS) and both <= (self._limit or 0):
            self._kept.remove(best)
            self._kept.append(best)  # used last, so that it stays
            context = self._opened()
            context.backend.restore(arrays, tokens)
            context.position = tokens
            return context
        self._kept.remove(best)
        source.rewind(tokens)
        return source

    def _read(self, prompt: Prompt, more_than: int) -> Context | None:
        """Return a context with more tokens of a prompt from the folder, if it has them."""
        if self._folder is None or len(prompt.token_ids) < LEAST_TOKENS:
            return None
        context = self._opened()
        resumes = context.backend.resumes(len(prompt.token_ids))
        found = self._folder.find(prompt, resumes, more_than)
        if found is None:
            return None
        path, tokens = found
        if not self._folder.read(path, tokens, context.backend):
            return None
        context.position = tokens
        return context

    def _opened(self) -> Context:
        try:
            return self._engine.open_context(self._length)
        except OutOfMemoryError:
            if not self._kept:
                raise
            self._kept.clear()
            return self._engine.open_context(self._length)

    def _collect(self) -> None:
        """Take back contexts of calls that have ended."""
        while self._ended:
            prefix, keep = self._ended.popleft()
            self._lent.remove(prefix)
            if keep and prefix.computed:
                prefix.reserve(prefix.context.position)
                prefix.context.backend.rest()  # not when it ends, which may be as Python shuts down
                self._kept.append(prefix)

    def _evict(self) -> None:
        """Drop the oldest contexts until all that remain take no more than the limit."""
        while len(self._kept) > MOST_KEPT or (self._kept and self._nbytes() > (self._limit or 0)):
            self._drop(self._kept.pop(0))

    def _nbytes(self) -> int:
        return sum(prefix.nbytes for prefix in (*self._kept, *self._lent))
