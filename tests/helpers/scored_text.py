"""The checkpoint and the text that evaluations score."""

from __future__ import annotations

from installed import DATA

CHECKPOINT = DATA / "conformance" / "full" / "consolidated"
TEXT = "The capital of France is Paris. The capital of Peru is Lima. To read news there, learn é.\n"
