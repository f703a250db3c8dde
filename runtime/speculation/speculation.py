"""Speculation of a model, and the guesses of one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.interface import MOST, StepCosts
from stem_edge.runtime.backends.options import Draft
from stem_edge.runtime.engine import NO_GUESSES, Guesses
from stem_edge.runtime.speculation.drafts import Drafts, Source
from stem_edge.runtime.speculation.gate import PLAIN, Gate
from stem_edge.runtime.speculation.text_drafts import TextDrafts


class Speculation:
    """Makes the guesses of a model's answers.

    most: tokens that are drafted for a step. sources: what drafts in addition to the text, with what releases
    them, `close`. attention: see Gate.
    """

    def __init__(
        self,
        costs: StepCosts,
        most: int,
        sources: Sequence[Source] = (),
        attention: float = 0.0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.costs, self._sources, self.close = costs, sources, close
        self._gate = Gate(costs.times, most, attention)

    @property
    def most(self) -> int:
        """Most tokens of a step beside its first."""
        return self._gate.most

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int, context: Context) -> Iterator[Guesses]:
        """Lend the guesses for an answer; no guesses where not even right ones would pay.

        length: most tokens of prompt and answer that are computed. context: the answer's.
        """
        if not self._gate.can_pay:
            yield NO_GUESSES
            return
        with ExitStack() as lent:
            drafts: list[Drafts] = [TextDrafts()]
            for source in self._sources:
                with suppress(StemEdgeError):  # such as lack of memory: an answer needs no drafts
                    begun = source(prompt, length + self.most, context)
                    drafts.append(lent.enter_context(begun))
            yield GatedGuesses(self._gate, drafts, self.costs.seconds)


class CallerDrafts(Speculation, Guesses):
    """Drafts from a function of the caller's: all are computed, up to the first that is no token."""

    def __init__(self, draft: Draft, vocab_size: int, costs: StepCosts | None) -> None:
        super().__init__(costs or StepCosts(seconds=1.0, times={}, same_bits=False), MOST - 1)
        self._draft, self._vocab_size = draft, vocab_size

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int, context: Context) -> Iterator[Guesses]:
        yield self

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        drafts = self._draft(seen, room)[:room]
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, drafts))


class GatedGuesses(Guesses):
    """As many guesses as are expected to pay, of the source that pays most.

    drafts: of each source, that of the text first. seconds: of a step of one token.
    """

    def __init__(self, gate: Gate, drafts: list[Drafts], seconds: float) -> None:
        self._gate, self._drafts, self._seconds = gate, drafts, seconds
        self._chosen, self._made = drafts[0], list[int]()  # in the step before
        self.quick = False  # because a long text takes a while to index at first

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        gate, best, chosen = self._gate, PLAIN, self._drafts[0]
        self.quick = not any(drafts.seconds for drafts in self._drafts)
        for drafts in self._drafts:
            drafts.learn(seen, self._made if drafts is self._chosen else [])
            if not (chances := drafts.chances(seen, gate.most)):
                continue
            choice = gate.choose(chances, room, drafts.seconds / self._seconds, len(seen))
            if choice.gain > best.gain:
                best, chosen = choice, drafts
        self._chosen = chosen
        self._made = self._of(chosen, seen, best.drafts) if best.drafts else []
        return self._made

    def _of(self, drafts: Drafts, seen: Sequence[int], count: int) -> list[int]:
        """Return drafts. A source that fails drafts never again."""
        try:
            return drafts.draft(seen, count)
        except StemEdgeError:
            self._drafts.remove(drafts)
            return []
