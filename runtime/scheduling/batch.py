"""Steps of several sequences, alternating with the other callers of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch
from stem_edge.runtime.engine import Context, Engine, Step


class RunningBatch:
    """Contexts in places 0, 1, ... that decode together. Raises what steps of an engine raise.

    size: most contexts. apart: step each by itself, so that its logits have the bits that they have alone.
    """

    def __init__(self, engine: Engine, size: int, length: int, *, apart: bool = False) -> None:
        self._engine = engine
        self._contexts: list[Context] = []  # in their places
        self._backend: BackendBatch | None = None  # if this engine can step them together
        if not apart:
            self._backend = engine.in_turn(lambda: engine.backend.open_batch(size, length))

    @property
    def together(self) -> bool:
        """True if contexts are stepped together."""
        return self._backend is not None

    def close(self) -> None:
        """Give up all contexts; takes no lock. A step under way in another thread is completed."""
        self._backend, self._contexts = None, []

    def join(self, context: Context) -> None:
        """Add a context in the next place. It takes no step alone until it leaves."""
        if (batch := self._backend) is not None:
            context.joined = True  # first, so that nothing of it is kept if this is interrupted
            self._moving(partial(batch.join, context.backend, context.position), [context])
        self._contexts.append(context)

    def leave(self, place: int) -> None:
        """Give a context back as it joined; the last one moves to its place."""
        context, last = self._contexts[place], self._contexts[-1]
        if self._backend is not None:
            self._moving(partial(self._backend.leave, place), [context, last])
            context.joined = False
        self._contexts.pop()
        if context is not last:
            self._contexts[place] = last

    def _moving(self, move: Callable[[], None], contexts: list[Context]) -> None:
        """Move contexts; meanwhile, nothing is copied from them."""
        before = [context.position for context in contexts]
        for context in contexts:
            context.position = 0
        try:
            self._engine.in_turn(move)
        finally:
            for context, position in zip(contexts, before, strict=True):
                context.position = position

    def step_or_errors(
        self, step: Step, positions: Sequence[int], following: Step | None
    ) -> list[F32 | Exception]:
        """Process a token of each sequence; return the logits [V] or the error of each.

        Arguments as for `step`. If the step of all of them fails, each is tried alone. Raises
        InputError once the model is closed.
        """
        try:
            return list(self.step(step, positions, following))
        except StemEdgeError as error:
            self._engine.check_usable()
            if len(positions) == 1:
                return [error]
        found: list[F32 | Exception] = []
        for place, position in enumerate(positions):
            one = Step(step.token_ids[[place]], step.row_ids[[place]], 1)
            try:
                # Copied, because the next one overwrites them.
                found.append(self.step(one, [position], first=place)[0].copy())
            except (StemEdgeError, MemoryError) as error:
                self._engine.check_usable()
                found.append(error)
        return found

    def step(
        self,
        step: Step,
        positions: Sequence[int],
        following: Step | None = None,
        *,
        first: int = 0,
    ) -> F32:
        """Process a token of each sequence in places first, first + 1, ...; return logits [n, V].

        positions [n]: of these tokens in their texts. following: as for Engine.step. The rows of
        all are fetched together, a record once. The next step overwrites the logits. When it raises,
        sequences can be stepped again, together or one by one.
        """
        rows, row_ids, batch = self._engine.rows, step.row_ids, self._backend
        if batch is None:
            return self._one_by_one(step, positions, following, first)

        def run() -> F32:
            batch.begin(first, step.token_ids, np.array(positions, np.int64))
            slots = rows.slots(row_ids, len(row_ids))
            if following is not None:
                rows.expect(following.row_ids, following.logits, following.later)
            return batch.finish(slots)

        return self._engine.in_turn(run)

    def _one_by_one(
        self, step: Step, positions: Sequence[int], following: Step | None, first: int
    ) -> F32:
        """Step each context by itself."""
        found, last = list[F32](), len(positions) - 1
        for n, position in enumerate(positions):
            context = self._contexts[first + n]
            context.position = position  # also if it is tried again, because another one failed
            ids, row_ids = step.token_ids[[n]], step.row_ids[[n]]
            after = following if n == last else None
            found.append(self._engine.step(context, ids, 1, after, row_ids=row_ids).copy())
        return np.concatenate(found)
