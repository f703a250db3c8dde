"""Sequences that decode together."""

from __future__ import annotations

from functools import partial

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.interface import BackendPlaces
from stem_edge.runtime.engine import Engine, Step


class Batch:
    """Contexts in places 0, 1, ... whose steps process a token of each. Raises what steps of an engine raise.

    size: most contexts. apart: step each by itself, so that its logits have the bits that they have alone.
    """

    def __init__(self, engine: Engine, size: int, length: int, *, apart: bool = False) -> None:
        self._engine = engine
        self._contexts: list[Context] = []  # in their places
        self._places: BackendPlaces | None = None  # if this engine can step them together
        if not apart:
            self._places = engine.in_turn(lambda: engine.backend.open_places(size, length))

    @property
    def together(self) -> bool:
        """True if contexts are stepped together."""
        return self._places is not None

    def close(self) -> None:
        """Give up all contexts; takes no lock. A step under way in another thread is completed."""
        self._places, self._contexts = None, []

    def join(self, context: Context) -> None:
        """Add a context in the next place. It takes no step alone until it leaves."""
        if self._places is not None:
            context.joined = True  # first, so that nothing of it is kept if this is interrupted
            self._engine.in_turn(partial(self._places.join, context.backend, context.position))
        self._contexts.append(context)

    def leave(self, place: int) -> None:
        """Give a context back with the prompt that it computed; the last one moves to its place."""
        context = self._contexts[place]
        if self._places is not None:
            context.position = context.computed
            self._engine.in_turn(partial(self._places.leave, place, context.position))
            context.joined = False
        last = self._contexts.pop()
        if context is not last:
            self._contexts[place] = last

    def step(self, step: Step, following: Step | None) -> list[F32 | Exception]:
        """Process a token of each context; return the logits [V] or the error of each.

        following: as for Engine.step. Rows of all contexts are fetched together, each record once. If the
        step of all of them fails, each is tried alone. Raises InputError once the model is closed.
        """
        if self._places is not None:
            try:
                return list(self._engine.step(self._contexts, step, following))
            except StemEdgeError as error:
                self._engine.check_usable()
                if len(self._contexts) == 1:
                    return [error]
        found, last = list[F32 | Exception](), len(self._contexts) - 1
        for place, context in enumerate(self._contexts):
            one = Step(step.token_ids[[place]], step.row_ids[[place]], 1)
            try:
                after = following if place == last else None
                found.append(self._engine.step([context], one, after)[0])
            except (StemEdgeError, MemoryError) as error:
                self._engine.check_usable()
                found.append(error)
        return found
