"""Rows to results on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from stem_edge.batches.results import Result
from stem_edge.batches.rows import Row
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams

# What computes a batch: takes rows as it needs them, and yields a result for each, in any order.
Answers: TypeAlias = Callable[[Iterable[Row]], Iterator[Result]]

SEQUENCES = 8  # answers computed together, if memory allows


@dataclass(frozen=True)
class Settings:
    """What holds for all rows; can be pickled.

    params: of rows that say nothing else. sequences: most that decode together. name: of the model in
    results of OpenAI's form; None: that of the bundle's folder.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    sequences: int = SEQUENCES
    name: str | None = None


def answer(model: Model, rows: Iterable[Row], settings: Settings | None = None) -> Iterator[Result]:
    """Yield a result for each row, in the order of their completion.

    Rows are taken as places become free, so they may be of any number. What is wrong with a row makes
    its result an error; what ends the model, such as a lost device, is raised.
    """
    settings = settings or Settings()
    for row in rows:  # one after the other: the batching version follows
        given = msgspec.json.decode(row.data)
        text = model.generate_text(given["prompt"], settings.params)
        data = msgspec.json.encode({"id": row.id, "text": text})
        yield Result(row.id, row.line, data)
