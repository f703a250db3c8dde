"""The engine: token ids in, logits out. It reads rows from flash while the backbone computes.

Token ids go to the backbone. Row ids go to `Rows`: they say which rows a token looks up
(its own rows, unless an edit changes that).

A step begins with the layers that need no rows, so that on slow flash they run while records
arrive. Backend and rows are not thread-safe, so one caller at a time uses them for a whole step.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np

from stem_edge.errors import BackendError, InputError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.context import NO_PROMPT, Context, PromptKey
from stem_edge.runtime.backends.costs import DAMAGED, LEAST_CHUNK, LESS_MEMORY
from stem_edge.runtime.rows.rows import NO_IDS, EditRow, Rows
from stem_edge.system.memory import raise_out_of_memory
from stem_edge.tables.rows import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import Backend

T = TypeVar("T")


class Step(NamedTuple):
    """The tokens that one step processes.

    row_ids: ids of the rows to look up; a token's own row has the token id. logits: number of last
    tokens whose logits are returned. later: row ids of later steps, to read their rows ahead.
    """

    token_ids: I64  # [T]
    row_ids: I64  # [T]; with several rows for each token, [T, n] (RowKeys)
    logits: int
    later: I64 = NO_IDS


# (token ids of the prompt and the answer so far, largest number of drafts) -> drafts
Guesses: TypeAlias = Callable[[Sequence[int], int], list[int]]
Speculation: TypeAlias = Callable[[Context], Guesses]  # makes the source of drafts for an answer


class Engine:
    """Runs steps, one at a time. Threads may share it: each waits until the engine is free.

    All methods except `close` raise InputError after `close`, and in a process forked from
    the process that loaded the model, because the model's threads do not exist there. They raise
    OutOfMemoryError when an allocation fails.
    """

    def __init__(self, backend: Backend, rows: Rows, chunk_tokens: int, logit_tokens: int) -> None:
        self._process = os.getpid()
        self.backend, self.rows, self.planned_chunk = backend, rows, chunk_tokens
        self.planned_logits = logit_tokens
        self.uses_prefill = True  # False for comparisons: prompts are computed by the decode graph
        # Re-entrant, because a signal handler that interrupts a step in this thread must not wait.
        self._lock = threading.RLock()
        self._busy = self._closing = False
        # A thread still in native code when the interpreter ends would crash, so wait for its step.
        self._at_exit = weakref.finalize(self, _close, weakref.ref(self))

    @property
    def chunk_tokens(self) -> int:
        """Maximum tokens per step. All distinct rows of a step must fit in the row cache together."""
        return min(self.planned_chunk, self.rows.step_tokens)

    @property
    def logit_tokens(self) -> int:
        """Maximum tokens of a step that returns logits for every token; such logits can be large."""
        return min(self.planned_logits, self.chunk_tokens)

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def check_usable(self) -> None:
        if self.forked:
            raise InputError(
                f"this model was loaded in process {self._process} and cannot be used in process "
                f"{os.getpid()}, a fork of it; load it again in this one"
            )
        if self._closing:
            raise InputError("this model is closed; load it again")

    def in_turn(self, call: Callable[[], T]) -> T:
        """Run `call` with exclusive use of backend and rows; return its result.

        It is not a context manager, because an interrupt at the start of __exit__ would leave the lock held.
        """
        self.check_usable()  # without the lock, which may be held forever after a fork
        with self._lock:
            self.check_usable()  # again, because another thread may have closed it meanwhile
            if self._busy:
                raise InputError("a signal handler cannot use the model mid-step; return first")
            try:
                self._busy = True
                return call()
            except MemoryError as error:
                raise_out_of_memory(error, "for this step", LESS_MEMORY)
            finally:
                self._busy = False
                if self._closing:
                    self._release()

    def open_context(self, length: int, prompt: PromptKey = NO_PROMPT) -> Context:
        """Open an empty context (KV cache) for `length` tokens. prompt: key of the prompt that it will hold."""
        return self.in_turn(lambda: Context(self.backend.open_context(length), prompt))

    def step(
        self,
        contexts: Sequence[Context],
        step: Step,
        following: Step | None = None,
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> F32:
        """Process one step, which has tokens for each context; return logits [step.logits, V].

        A step has at most chunk_tokens tokens. Several contexts must be adjacent in the backend's batch. following:
        the next step, whose rows may be read while this step computes. prefill: the tokens are part of a prompt.
        apart: give each token the same bits as a single-token step, if the backend can.
        The next step of these contexts overwrites the logits. If a step raises an error, the contexts are
        unchanged, and the caller can try the step again.
        """

        def run() -> F32:
            by_prefill = prefill and self.uses_prefill
            backends = [context.backend for context in contexts]
            positions = [context.position for context in contexts]
            ids = step.token_ids.reshape(len(contexts), -1)
            self.backend.begin(backends, ids, positions, prefill=by_prefill, apart=apart)
            slots = self.rows.slots(step.row_ids)
            if following is not None:
                self.rows.expect(following.row_ids, following.later)
            result = self.backend.finish(slots, step.logits // len(contexts))
            if result.size and not (np.isfinite(result.min()) and np.isfinite(result.max())):
                raise _not_finite(result, positions, ids.shape[1])
            for context in contexts:
                context.position += ids.shape[1]
            return result

        return self.in_turn(run)

    def expect(self, step: Step) -> None:
        """Start reading the rows of the next step."""
        self.in_turn(lambda: self.rows.expect(step.row_ids, step.later))

    def make(self, lookups: Sequence[RowLookup]) -> list[EditRow]:
        """Return the rows for lookups, which have a row per STEM layer each. See Rows.make."""
        return self.in_turn(lambda: self.rows.make(lookups))

    def steps(
        self,
        token_ids: Sequence[int],
        row_ids: I64 | None = None,
        *,
        computed: int = 0,
        all_logits: bool = False,
    ) -> list[Step]:
        """Split a prompt into steps that return the last token's logits, or those of all tokens.

        row_ids [T]: rows that the tokens look up; default: the tokens' own rows. all_logits: True for logits of all tokens.
        computed: number of leading ids already in the context. Steps begin where they would in an empty context.
        """
        tokens = np.asarray(token_ids, np.int64)
        own = tokens if row_ids is None else np.asarray(row_ids)
        looked_up = self.rows.ids(tokens, own)
        starts = self.starts(len(tokens), all_logits=all_logits)
        starts = [0, *(at - computed for at in starts if at > computed)]
        left, wanted = tokens[computed:], looked_up[computed:]
        steps = [
            Step(left[at:end], wanted[at:end], all_logits * (end - at), wanted[end:])
            for at, end in pairwise([*starts, len(left)])
        ]
        steps[-1] = steps[-1]._replace(logits=max(1, steps[-1].logits))
        return steps

    def starts(self, tokens: int, *, all_logits: bool = False) -> list[int]:
        return starts_of(tokens, self.logit_tokens if all_logits else self.chunk_tokens)

    def close(self) -> None:
        """Stop the prefetching thread, close the table store, and release the backbone.

        Waits for a running step. If a signal handler that interrupted a step calls this, the engine is
        released when that step ends. In a forked process it does nothing.
        """
        if self.forked:
            return
        self._closing = True
        with self._lock:
            if not self._busy:
                self._release()

    def __del__(self) -> None:
        # Freeing a backend joins threads that do not exist after a fork, so leak it instead.
        if self.forked:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.backend))

    def _release(self) -> None:
        try:
            self.rows.close()
        finally:
            self.backend.close()
        self._at_exit.detach()


def starts_of(tokens: int, size: int) -> list[int]:
    """Split a prompt of `tokens` tokens into steps of up to `size` tokens; return their starts.

    Kernels compute tokens in pairs and round an unpaired token differently. So step sizes are even, and the last
    step has more than one token unless the prompt has only one. Then all sizes from 4 on give the same logits.
    Rounding still differs once a sliding window has dropped tokens, and with float16 KV caches on onnxruntime.
    """
    if size >= LEAST_CHUNK:
        size -= size % 2
    starts = list(range(0, tokens, size))
    if size >= LEAST_CHUNK and len(starts) > 1 and starts[-1] == tokens - 1:
        starts[-1] -= 2
    return starts


def _not_finite(logits: F32, positions: Sequence[int], tokens: int) -> BackendError:
    """Return an error that names the first token whose logits are not all finite.

    logits [B * n, V]: logits of the last n tokens in each of B contexts. tokens: number of tokens per context
    in the step. positions [B]: position of each context's first token in the step.
    """
    wrong = ~np.isfinite(logits)
    place, wanted = int(wrong.any(axis=1).argmax()), len(logits) // len(positions)
    position = positions[place // wanted] + tokens - wanted + place % wanted
    return BackendError(
        f"{int(wrong[place].sum()):,} of {logits.shape[1]:,} logits at position {position} are not finite; "
        f"{DAMAGED}"
    )


def _close(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
