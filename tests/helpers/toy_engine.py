"""A complete toy engine, to show what an engine needs: logits follow from a token and its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.runtime.backends.engines import EngineEntry
from stem_edge.runtime.backends.memory_plan import Needs, Part
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.rows import RecordLayout


@dataclass(frozen=True)
class ToyEngine(EngineEntry):
    """An engine in the place of onnxruntime, with a loader of this class for each bundle."""

    own: Any = None
    versions = {"toy": "7"}  # noqa: RUF012  (never changed)

    def loader(self, bundle: Bundle, options: LoadOptions) -> Any:
        return self.own(bundle)


def toy_engine(loader: type[ToyLoader]) -> ToyEngine:
    """Return the entry of an engine with this loader."""
    return ToyEngine("onnxruntime", "pip install toy", lambda: True, lambda: "7", (), own=loader)


class ToyLoader:
    """An EngineLoader (stem_edge.runtime.backends.engines)."""

    name, fills_while_opening, step_costs = "toy", True, None

    def __init__(self, bundle: Bundle) -> None:
        self.manifest = bundle.manifest

    def prepare(self) -> None:
        """Nothing to do."""

    def needs(self, context: int) -> Needs:
        """Memory of the slots, and 100 bytes per token."""
        footprint = footprint_of(self.manifest)
        return Needs(footprint, context, Part(1000, 100 * context, 0, 10, 0, footprint.slot_nbytes))

    def make_slots(self, layout: RecordLayout, count: int) -> ArraySlots:
        """Keep codes and scales as in the records."""
        return ArraySlots(layout, count)

    def open(self, slots: Any) -> ToyBackend:
        """Open a backend over these slots."""
        return ToyBackend(self.manifest.model.vocab_size, slots)


class ToyBackend:
    """A Backend (stem_edge.runtime.backends.interface) that is its own, stateless context."""

    nbytes = earliest = settled = 0

    def __init__(self, vocab_size: int, slots: ArraySlots) -> None:
        self.vocab_size, self.slots, self.length = vocab_size, slots, 0

    def open_context(self, length: int) -> ToyBackend:
        """Open a context of so many tokens."""
        self.length = length
        return self

    def open_batch(self, size: int, length: int) -> None:
        """Let sequences be stepped one by one."""

    def nbytes_of(self, tokens: int) -> int:
        """Count no memory."""
        return 0

    def resumes(self, tokens: int) -> str:
        """Let every call compute its whole prompt."""
        return ""

    def rest(self) -> None:
        """Free nothing."""

    def kept(self, tokens: int) -> list[Any]:
        """Keep nothing."""
        return []

    def restore(self, arrays: Any, tokens: int) -> None:
        """Restore nothing."""

    def together(self, position: int) -> int:
        """Let a step have as many tokens as fit."""
        return self.length - position

    def begin(
        self, token_ids: Any, position: int, *, prefill: bool = False, apart: bool = False
    ) -> None:
        """Keep the tokens for `finish`."""
        self.tokens = token_ids

    def finish(self, slot_ids: Any, logits: int) -> Any:
        """Predict the token id plus the sum of its row's codes, modulo the vocabulary."""
        rows = self.slots.codes[0][0][slot_ids].sum(1, dtype=np.int64)
        found = np.zeros((len(slot_ids), self.vocab_size), np.float32)
        found[np.arange(len(rows)), (self.tokens + rows) % self.vocab_size] = 1
        return found[len(rows) - logits :]

    def close(self) -> None:
        """Nothing to release."""
