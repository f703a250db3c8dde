"""Do kernels for many tokens give what those for few give? On some devices they do not, and say nothing.

WebGPU's attention for prompts, from 32 tokens in a step on, is one such kernel: on devices that
compute in groups of few lanes, its results are wrong. So before a backbone on a device is trusted
with long steps, it takes the same tokens in short ones, and the logits are compared.
"""

from __future__ import annotations

import numpy as np

from stem_edge.quantize import F32, I32
from stem_edge.runtime.backend import Backend, NotFiniteError
from stem_edge.runtime.prefetch import ANY_NUMBER
from stem_edge.runtime.slots import Slots, placeholder_rows

MANY_TOKENS, FEW_TOKENS = 64, 16
# Distance of logits of one position, as a share of their size. Right ones in float16 were up to
# 0.003 apart in six layers, wrong ones 0.026 or more, with rows as large as what they stand for.
MOST_APART = 0.012


def agreeing_tokens(backend: Backend, slots: Slots | None, context_length: int) -> int:
    """How many tokens a step may have: ANY_NUMBER, unless many at once give other logits than few.

    Slots are given made-up rows: nobody may look for others there. Raises BackendError: what a
    device lacks shows when a step runs; NotFiniteError if few give none that are numbers.
    """
    # Whole steps of few, so that both ways end with logits of the same positions.
    tokens = min(MANY_TOKENS, context_length - context_length % FEW_TOKENS) or context_length
    taken = placeholder_rows(slots, tokens)
    few = _last_logits(backend, taken, min(FEW_TOKENS, tokens))
    if tokens <= FEW_TOKENS:
        return ANY_NUMBER
    try:
        many = _last_logits(backend, taken, tokens)
    except NotFiniteError:
        return FEW_TOKENS
    apart = np.square(many - few).mean(axis=1) / np.square(few).mean(axis=1)
    return ANY_NUMBER if apart.max() <= MOST_APART**2 else FEW_TOKENS


def _last_logits(backend: Backend, slots: I32, step: int) -> F32:
    """Logits [n, V] of the last of so many tokens as there are slots, taken in steps."""
    context = backend.open_context(len(slots))
    ids = np.arange(len(slots), dtype=np.int64)
    for start in range(0, len(ids), step):
        piece = slice(start, start + step)
        context.begin(ids[piece], start)
        logits = context.finish(slots[piece], min(FEW_TOKENS, len(ids[piece])))
    return logits.copy()  # the next context overwrites them
