"""A file of rows to a file of results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from stem_edge.batches.results import Result
from stem_edge.batches.rows import Row
from stem_edge.batches.run import Answers, answer
from stem_edge.runtime.model import Model


def batch(
    input: str | Path,
    output: str | Path,
    model: Model | None = None,
    *,
    answers: Answers | None = None,
) -> None:
    """Answer the rows of a file into another.

    answers: what computes them; default: `answer`, with the model.
    """
    if answers is None:
        assert model is not None
        answers = partial(answer, model)
    with Path(output).open("ab") as file:
        file.writelines(result.data + b"\n" for result in answers(_rows(Path(input))))


def _rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield Row(msgspec.json.decode(line).get("id", number), number, line)


__all__ = ["Result", "batch"]
