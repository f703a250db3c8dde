"""Drafts from a text that the test knows, so that it decides how many there are, and which are right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from stem_edge import Chunk, Model

SIZES = (7, 1, 0, 3, 5, 2)  # drafts of a step, in turn


class Told:
    """Drafts what follows in `text`; every n-th draft is another token. For load(speculate=...)."""

    def __init__(self) -> None:
        self.tell(())

    def tell(self, text: Sequence[int], wrong: int = 1 << 30, sizes: Sequence[int] = SIZES) -> None:
        """Draft from this text from now on."""
        self.text, self.wrong, self.sizes = text, wrong, sizes
        self.calls, self.drafted = count(), count(1)

    def __call__(self, seen: Sequence[int], room: int) -> list[int]:
        size = min(room, self.sizes[next(self.calls) % len(self.sizes)])
        known = self.text[len(seen) : len(seen) + size]
        return [token ^ (next(self.drafted) % self.wrong == 0) for token in known]


def answered(
    model: Model, prompt: Sequence[int], **options: Any
) -> tuple[str, list[int], str | None]:
    """Return text, token ids and finish reason of an answer."""
    return answer_of(list(model.generate(prompt, **options)))


def answer_of(chunks: Sequence[Chunk]) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason of an answer."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), ids, chunks[-1].finish_reason


class Shorter:
    """A clock by which whatever is measured later took less time, so that drafts pay."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.step = 0.0, 1.0
        for module in ("backends.step_measure", "speculation.opening"):
            patch.setattr(f"stem_edge.runtime.{module}.time", self)

    def perf_counter(self) -> float:
        self.step *= 0.9
        self.now += self.step
        return self.now
