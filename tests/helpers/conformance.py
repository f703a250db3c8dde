"""Checkpoints with the logits of the code that trained them, and a text to score them on."""

from __future__ import annotations

import numpy as np
from installed import DATA

from stem_edge.numerics.quantize import F32

CONFORMANCE = DATA / "conformance"
CHECKPOINT = CONFORMANCE / "full" / "consolidated"
TEXT = "The capital of France is Paris. The capital of Peru is Lima. To read news there, learn é.\n"
CASES = [
    "full/consolidated",
    "third/consolidated",
    "full/training",
    "half/training",
    "blagpt-third",
    "blagpt-full",
]


def reference(case: str) -> tuple[list[list[int]], F32]:
    """Read token ids [2, T] and the trainer's logits [2, T, V]."""
    with np.load(CONFORMANCE / case.split("/")[0] / "reference.npz") as data:
        return data["token_ids"].tolist(), data["logits"]
