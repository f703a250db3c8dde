"""A whole engine: logits that follow from a token and its row, to show what an engine has to have."""

from __future__ import annotations

from typing import Any

import numpy as np

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import Bundle
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.plan import Needs, Part
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.rows import RecordLayout


def loaders(bundle: Bundle, options: LoadOptions) -> list[ToyLoader]:
    """The one way."""
    return [ToyLoader(bundle)]


class ToyLoader:
    """See stem_edge.runtime.backends.engines.EngineLoader."""

    name, fills_while_opening, step_tokens = "toy", True, 1 << 30

    def __init__(self, bundle: Bundle) -> None:
        self.manifest = bundle.manifest

    def prepare(self, verdict: object) -> None:
        """Nothing to do."""

    def needs(self, context: int) -> Needs:
        """Slots, and 100 bytes a token."""
        footprint = footprint_of(self.manifest)
        return Needs(footprint, context, Part(1000, 100 * context, 0, 10, footprint.slot_nbytes))

    def make_slots(self, layout: RecordLayout, count: int) -> ArraySlots:
        """Codes and scales as records have them."""
        return ArraySlots(layout, count)

    def open(self, slots: Any) -> ToyBackend:
        """Over these slots."""
        return ToyBackend(self.manifest.model.vocab_size, slots)


class ToyBackend:
    """See stem_edge.runtime.backends.interface.Backend; its contexts are itself, for they keep nothing."""

    nbytes = 0

    def __init__(self, vocab_size: int, slots: ArraySlots) -> None:
        self.vocab_size, self.slots, self.length = vocab_size, slots, 0

    def open_context(self, length: int) -> ToyBackend:
        """Of so many tokens."""
        self.length = length
        return self

    def begin(self, token_ids: Any, position: int, *, prefill: bool = False) -> None:
        """Keep the tokens."""
        self.tokens = token_ids

    def finish(self, slot_ids: Any, logits: int, top: int = 0) -> Any:
        """The greatest logit is that of the token and the sum of its row's codes, together."""
        rows = self.slots.codes[0][0][slot_ids].sum(1, dtype=np.int64)
        found = np.zeros((len(slot_ids), self.vocab_size), np.float32)
        found[np.arange(len(rows)), (self.tokens + rows) % self.vocab_size] = 1
        return found[len(rows) - logits :]

    def close(self) -> None:
        """Nothing to release."""
