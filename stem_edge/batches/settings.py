"""Settings for all rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from stem_edge.batches.rows import InputRow, Result
from stem_edge.runtime.backends.options import check_sequences
from stem_edge.runtime.sampling_params import SamplingOptions, params_of

# What computes a batch: takes rows as it needs them, and yields a result for each, in any order.
Answers: TypeAlias = Callable[[Iterable[InputRow]], Iterator[Result]]

SEQUENCES = 8  # answers computed together, if memory allows


@dataclass(frozen=True)
class Settings:
    """Settings for all rows of a batch; can be pickled.

    options: of plain rows that say nothing else, without a seed. seed: of the batch; each sampled row
    without a seed derives its own from this and its id, so that a repeat gives the same. None:
    different each time. sequences: most that decode together. name: of the model in results of OpenAI's
    form; default: the bundle's folder, or its name on a hub. Raises InputError.
    """

    options: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int | None = 0
    sequences: int = SEQUENCES
    name: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for what no row could have."""
        check_sequences(self.sequences)
        params_of(None, {**self.options, "seed": self.seed})

    def seed_of(self, row: InputRow) -> int | None:
        """Return the seed of a row without its own."""
        if self.seed is None:
            return None
        given = self.seed.to_bytes(8, "little") + row.key
        return int.from_bytes(blake2b(given, digest_size=8).digest(), "little")
