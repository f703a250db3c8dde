"""Steps of a batch, in turn with the other callers of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.engine import Context, Engine, Step


class Rounding(NamedTuple):
    """How far the bits of a token may depend on what is computed in the same step."""

    exact: bool = (
        False  # compute guesses only where each has the bits of a step alone: see Decoding
    )
    # Step each sequence in its own context, so that its logits have the bits that they have alone.
    apart: bool = False
    # Run a lone request in the batch, too, so that tokens do not depend on how many sequences there are.
    steady: bool = False


class RunningBatch:
    """Sequences in places 0, 1, ... that decode together. Raises what steps of an engine raise."""

    def __init__(self, engine: Engine, size: int, length: int, *, apart: bool = False) -> None:
        self._engine = engine
        self._backend: BackendBatch = (
            PlainBatch()
            if apart
            else engine.in_turn(lambda: engine.backend.open_batch(size, length))
        )

    @property
    def copies(self) -> bool:
        """Whether a context that has joined is free again."""
        return self._backend.copies

    def close(self) -> None:
        """Give back all sequences; takes no lock. A step under way in another thread is completed."""
        self._backend = PlainBatch()

    def join(self, context: Context, tokens: int) -> None:
        """Add a sequence in the next place, with what a context has of its first tokens."""
        self._engine.in_turn(lambda: self._backend.join(context.backend, tokens))

    def leave(self, place: int) -> None:
        """Remove a sequence; the last one moves to its place."""
        self._engine.in_turn(lambda: self._backend.leave(place))

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
        rows, row_ids = self._engine.rows, step.row_ids

        def run() -> F32:
            self._backend.begin(first, step.token_ids, np.array(positions, np.int64))
            slots = rows.slots(row_ids, len(row_ids))
            if following is not None:
                rows.expect(following.row_ids, following.logits, following.later)
            return self._backend.finish(slots)

        return self._engine.in_turn(run)
