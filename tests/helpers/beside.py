"""A batch, and the same sequences stepped one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.graph.kv import KvType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.backends.interface import BackendBatch
from stem_edge.runtime.backends.plain_batch import PlainBatch

# Most a logit may differ. With fewer bits, a key that rounds to another code differs by more.
MOST: dict[KvType, float] = {"fp32": 1e-4, "fp16": 2e-3, "int8": 0.1, "int4": 0.5}


class Beside:
    """A batch, and contexts that take the same steps one after the other."""

    def __init__(
        self, model: Model, length: int, most: float = MOST["fp32"], sequences: int = 4
    ) -> None:
        self._engine, self._length, self._most = model.engine, length, most
        self.batch = model.engine.backend.open_batch(sequences, length)
        self.alone = PlainBatch()
        self.tokens: list[int] = []  # the next of each sequence
        self.texts: list[list[int]] = []  # what each sequence has so far

    def join(self, ids: Sequence[int], *, roomy: bool = True) -> None:
        """Compute a prompt in a context of the batch's length, or just long enough, that joins."""
        found, expected = (self._join(batch, ids, roomy) for batch in (self.batch, self.alone))
        assert np.array_equal(found, expected)
        self.tokens.append(int(expected.argmax()))
        self.texts.append(list(ids))

    def _join(self, batch: BackendBatch, ids: Sequence[int], roomy: bool) -> F32:
        long = roomy or not batch.copies
        context = self._engine.open_context(self._length if long else len(ids))
        (logits,) = self._engine.process(context, ids)
        logits = logits.copy()
        batch.join(context.backend, len(ids))
        if batch.copies:  # then others may use the context
            context.position = 0
            self._engine.step(context, np.array(ids[:3])[::-1])
        return logits

    def leave(self, place: int) -> None:
        for batch in (self.batch, self.alone):
            batch.leave(place)
        token, text = self.tokens.pop(), self.texts.pop()
        if place < len(self.texts):
            self.tokens[place], self.texts[place] = token, text

    def step(
        self, first: int = 0, count: int | None = None, tokens: list[int] | None = None
    ) -> None:
        """Step some sequences, and check that their logits and next tokens are those alone."""
        count = len(self.tokens) - first if count is None else count
        found = self.run(self.batch, first, count, tokens)
        expected = self.run(self.alone, first, count, tokens)
        assert found.shape == expected.shape and found.dtype == np.float32
        assert np.abs(found - expected).max() < self._most
        chosen = expected.argmax(axis=1).tolist()
        assert self._most > MOST["fp32"] or found.argmax(axis=1).tolist() == chosen
        for place in range(count):
            self.texts[first + place].append((tokens or self.tokens[first:])[place])
        self.tokens[first : first + count] = chosen

    def run(
        self, batch: BackendBatch, first: int, count: int, tokens: list[int] | None = None
    ) -> F32:
        """Return the logits of a step with these tokens, or those that come next."""
        chosen = self.tokens[first : first + count] if tokens is None else tokens
        self.begin(batch, first, chosen)
        texts, rows = self.texts[first : first + count], self._engine.rows
        looked_up = [rows.following(text, [n]) for text, n in zip(texts, chosen, strict=True)]
        return batch.finish(rows.slots(np.concatenate(looked_up), count)).copy()

    def begin(self, batch: BackendBatch, first: int, tokens: list[int]) -> None:
        """Begin a step with these tokens."""
        positions = [len(text) for text in self.texts[first : first + len(tokens)]]
        batch.begin(first, np.array(tokens, np.int64), np.array(positions, np.int64))
