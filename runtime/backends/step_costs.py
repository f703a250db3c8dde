"""Costs of decoding steps of several tokens, as they were measured."""

from __future__ import annotations

import msgspec

SIZES = (2, 4, 8)  # tokens of steps that are measured, and then taken
MOST = max(SIZES)  # tokens of a step


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured costs of decoding steps of several tokens."""

    seconds: float  # of a step of one token
    times: dict[int, float]  # tokens of a step -> its time beside that
    same_bits: bool  # whether a token's logits are those of a step of its own
    same_in_batches: bool = False  # whether they are in a step of several sequences
    threads: int = 0  # of the backbone; 0: those of this process
    sure: bool = True  # False where the machine was too busy to tell times
