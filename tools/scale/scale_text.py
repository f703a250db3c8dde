"""What the row cache reads when several sequences of real text decode together.

Runs the runtime's own RowCache on token ids, a step of one token of each sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scale_shapes import VOCABULARY
from scale_tables import Table

from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.rows import make_layout
from stem_edge.tables.token_counts import Counts, count_tokens

SLOTS = (512, 1024, 1282, 2048, 4096, 6413, 12_826)  # the last are 5 and 10 % of the vocabulary
CONVERSATION = 2000
F64: TypeAlias = npt.NDArray[np.float64]
WIDTH = 16  # values of the rows in these caches, because only which of them are kept matters


@dataclass(frozen=True)
class Reads:
    """Records that each step looks up and reads."""

    tokens: I64  # [steps]
    distinct: I64  # [steps]
    read: I64  # [steps]

    @property
    def batch(self) -> int:
        """Sequences that decode together, with a token of each in a step."""
        return int(self.tokens.max())

    @property
    def hit_rate(self) -> float:
        """Share of tokens that needed no read of their own, as the runtime counts them."""
        return 1 - self.read_per_token

    @property
    def read_per_token(self) -> float:
        """Records read for a token, on average."""
        return float(self.read.sum() / max(1, self.tokens.sum()))

    @property
    def distinct_per_step(self) -> float:
        """Distinct records of a step, on average."""
        return float(self.distinct.mean())

    def part(self, start: int, stop: int | None = None) -> Reads:
        """Return the steps from `start` on, before `stop`."""
        return Reads(*(each[start:stop] for each in (self.tokens, self.distinct, self.read)))


def no_reads() -> Reads:
    """Return a step of one token whose row is in the cache."""
    return Reads(*np.array([[1], [1], [0]]))


def read_texts(files: Iterable[Path]) -> I64:
    """Read files of little-endian int32 token ids, one after the other."""
    return np.concatenate([np.fromfile(file, "<i4").astype(np.int64) for file in files])


def in_step(ids: I64, batch: int) -> list[I64]:
    """Cut a text into `batch` pieces that decode together: the ids of each step."""
    steps = len(ids) // batch
    return list(ids[: steps * batch].reshape(batch, steps).T)


def run_cache(
    steps: Sequence[I64], slots: int, counts: Counts | None = None, records: int = VOCABULARY
) -> Reads:
    """Run a cache of so many slots on the ids of each step.

    slots: 0 for no cache, where a step reads each of its records once. counts: uses of another text,
    which fill the cache first.
    """
    tokens = np.array([len(step) for step in steps], np.int64)
    distinct = np.array([len(np.unique(step)) for step in steps], np.int64)
    if slots == 0:
        return Reads(tokens, distinct, distinct)
    layout = make_layout(records, (0,), ((WIDTH,),), "int8", WIDTH)
    # More slots than records are never filled; fewer than a step needs cannot hold its rows.
    slots = min(max(slots, int(tokens.max())), records)
    cache = RowCache(ArraySlots(layout, slots))
    rows = np.zeros((slots, layout.record_nbytes), np.uint8)
    if counts is not None and len(best := np.sort(cache.expect_counts(counts))):
        cache.install(best, rows[: len(best)], best)
    read = np.zeros(len(steps), np.int64)
    for number, step in enumerate(steps):
        cache.use(step)
        missing = cache.missing(step)
        if len(missing):
            cache.install(missing, rows[: len(missing)], step)
        read[number] = len(missing)
    return Reads(tokens, distinct, read)


class Text:
    """A text on which caches are simulated, each case once."""

    def __init__(self, ids: I64) -> None:
        self._ids = ids
        self._distinct = len(np.unique(ids))
        self._run = cache(self._settled)

    def reads(self, batch: int, slots: int) -> Reads:
        """Run a cache on the text in `batch` pieces; return the second half, after the first filled it."""
        # More slots than the text has ids change nothing.
        return self._run(batch, min(slots, self._distinct))

    def _settled(self, batch: int, slots: int) -> Reads:
        steps = in_step(self._ids, batch)
        return run_cache(steps, slots).part(len(steps) // 2)


def hits(ids: I64, other: I64, slots: Sequence[int] = SLOTS) -> Table:
    """Hit rates by slots: a whole text from nothing, and conversations from counts of another text."""
    counts = count_tokens(other, VOCABULARY)
    table = Table(
        "slots", "of V, %", "whole text, from nothing", "its second half",
        f"conversations of {CONVERSATION:,} ids, from nothing", "the same, from counts of another text",
    )  # fmt: skip
    starts = range(0, len(ids) - CONVERSATION + 1, CONVERSATION)
    pieces = [in_step(ids[at : at + CONVERSATION], 1) for at in starts]
    for count in slots:
        whole = run_cache(in_step(ids, 1), count)
        run = partial(run_cache, slots=count)
        rates = [
            [run(piece, counts=known).hit_rate for piece in pieces] for known in (None, counts)
        ]
        means = [sum(found) / len(found) for found in rates]
        second = whole.part(len(ids) // 2).hit_rate
        table.add(count, 100 * count / VOCABULARY, whole.hit_rate, second, *means)
    return table
