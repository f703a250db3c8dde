"""Sources of drafts for one answer: a function of the caller, or the best of several sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeAlias

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.backends.options import Draft
from stem_edge.runtime.engine import Guesses
from stem_edge.runtime.speculation.drafts import ModelDrafts
from stem_edge.runtime.speculation.gate import PLAIN, Gate
from stem_edge.runtime.speculation.text_drafts import TextDrafts

Drafts: TypeAlias = TextDrafts | ModelDrafts


class CallerDrafts(Guesses):
    """Drafts from a function of the caller. Stops before the first draft that is no token id."""

    def __init__(self, draft: Draft, vocab_size: int) -> None:
        self._draft, self._vocab_size = draft, vocab_size

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        drafts = self._draft(seen, room)[:room]
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, drafts))


class GatedGuesses(Guesses):
    """Drafts from the source with the highest expected gain, as many as are expected to pay.

    drafts: the sources; the one from the text is first. seconds: time of a one-token step.
    """

    def __init__(self, gate: Gate, drafts: list[Drafts], seconds: float) -> None:
        self._gate, self._drafts, self._seconds = gate, drafts, seconds
        self._chosen, self._made = drafts[0], list[int]()  # source and drafts of the last step

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        gate, best, chosen = self._gate, PLAIN, self._drafts[0]
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
        """Return drafts of a source. A source that raises an error is not used again."""
        try:
            return drafts.draft(seen, count)
        except StemEdgeError:
            self._drafts.remove(drafts)
            return []
