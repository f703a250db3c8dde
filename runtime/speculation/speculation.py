"""Speculation of a model, and the guesses of one answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.speculation.gate import PLAIN, Gate
from stem_edge.runtime.speculation.model_drafts import Drafter, ModelDrafts
from stem_edge.runtime.speculation.text_drafts import TextDrafts
from stem_edge.runtime.steps import NO_GUESSES, Guesses


class Speculation:
    """Makes the guesses of a model's answers.

    most: tokens that are drafted for a step. drafter: another model that guesses, too; it is closed with
    this.
    """

    def __init__(self, costs: StepCosts, most: int, drafter: Drafter | None = None) -> None:
        self.costs, self._gate, self._drafter = (
            costs,
            Gate(costs.times, most, costs.attention),
            drafter,
        )

    @property
    def most(self) -> int:
        """Most tokens of a step beside its first."""
        return self._gate.most

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int) -> Iterator[Guesses]:
        """Lend the guesses for an answer; no guesses where not even right ones would pay.

        length: most tokens of prompt and answer that are computed.
        """
        if not self._gate.can_pay:
            yield NO_GUESSES
            return
        with ExitStack() as lent:
            model, each = None, 0.0
            if (drafter := self._drafter) is not None and len(prompt) < drafter.context_length:
                each = drafter.seconds / self.costs.seconds
                longest = min(length + self.most, drafter.context_length)
                with suppress(StemEdgeError):  # such as lack of memory: an answer needs no drafts
                    context = lent.enter_context(
                        drafter.prefixes.lent(prompt, {}, longest, whole=True)
                    )
                    model = ModelDrafts(drafter.engine, context, prompt)
            yield GatedGuesses(self._gate, model, each)

    def close(self) -> None:
        """Close the model that drafts."""
        if self._drafter is not None:
            self._drafter.close()


class GatedGuesses(Guesses):
    """As many guesses as are expected to pay, from the text so far or from a model.

    each: time that the model takes for a token; a step of one takes 1.
    """

    def __init__(self, gate: Gate, model: ModelDrafts | None = None, each: float = 0.0) -> None:
        self._gate, self._text, self._model, self._each = gate, TextDrafts(), model, each
        self._from_text, self._from_model = 0, list[int]()  # drafts of the step before
        self.quick = False  # because a long text takes a while to index at first

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        self.quick, gate = self._model is None, self._gate
        self._text.learn(seen, self._from_text)
        by_text, by_model = (
            gate.choose(self._text.chances(gate.most), room, before=len(seen)),
            PLAIN,
        )
        if self._model is not None:
            self._model.learn(seen, self._from_model)
            by_model = gate.choose(
                self._model.chances(seen, gate.most), room, self._each, len(seen)
            )
        self._from_text, self._from_model = by_text.drafts, []
        if by_model.gain > by_text.gain:
            self._from_text, self._from_model = 0, self._of_model(seen, by_model.drafts)
            return self._from_model
        return self._text.draft(by_text.drafts)

    def _of_model(self, seen: Sequence[int], count: int) -> list[int]:
        """Return the model's drafts. If it fails, it drafts never again."""
        try:
            return self._model.draft(seen, count) if self._model is not None else []
        except StemEdgeError:
            self._model = None
            return []
