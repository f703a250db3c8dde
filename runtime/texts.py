"""Texts through a model without sampling: the logits of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.interface import PREFILL_FROM
from stem_edge.runtime.engine import Engine


def process(
    engine: Engine,
    context: Context,
    token_ids: Sequence[int],
    row_ids: I64 | None = None,
    *,
    every: bool = False,
) -> Iterator[F32]:
    """Process ids in chunks; yield logits [1, V] of the last id, or [n, V] of `every` one.

    Other arguments as for Engine.steps.
    """
    if not 0 < len(token_ids) <= context.room:
        raise InputError(
            f"{len(token_ids)} tokens do not fit: the context has room for {context.room}"
        )
    steps = engine.steps(token_ids, row_ids, every=every)
    engine.expect(steps[0])
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        logits = engine.step([context], step, after, prefill=len(token_ids) >= PREFILL_FROM)
        if step.logits:
            yield logits
