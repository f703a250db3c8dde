"""How many tokens of a cached prompt a later prompt can reuse without changing any bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stem_edge.runtime.backends.interface import Resumes

if TYPE_CHECKING:
    from stem_edge.runtime.backends.context import PromptKey

LEAST_COMPUTED = 2
# onnxruntime's attention splits the tokens of a step into blocks, whose size is a multiple of this number.
# It rounds a block of a single token differently.
ATTENTION_BLOCK = 16


def same_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def reusable(
    kept: PromptKey, computed: int, prompt: PromptKey, resumes: Resumes, settled: int = 0
) -> int:
    """Return how many leading tokens of the cached prompt `kept` a call for `prompt` can reuse.

    computed: number of tokens of `kept` with keys and values. settled: return 0 if fewer could be
    reused. resumes: where reuse may end: "pairs" and "steps" are explained below, "" allows no
    reuse. Reuse must not change a bit of the results. So n tokens can be reused only if:
    - both prompts have the same first n token ids and lookups, and use the same graph;
    - two or more tokens of `prompt` remain, because kernels round an unpaired token differently;
    - if `resumes` is "pairs" and all steps begin at even positions: n is even, which keeps the
    pairs;
    - otherwise ("steps"): in both prompts a step begins at n, and all steps before n are the same.
    Kernels may depend on all tokens of a step, and on tokens that a window has dropped.
    """
    if not resumes or kept.prefill != prompt.prefill:
        return 0
    alike = same_start(kept.token_ids, prompt.token_ids)
    places = kept.lookups.keys() | prompt.lookups.keys()
    changed = (at for at in places if kept.lookups.get(at) != prompt.lookups.get(at))
    most = max(0, min(computed, len(prompt.token_ids) - LEAST_COMPUTED, alike, *changed))
    if resumes == "pairs" and not any(at % 2 for at in (*kept.starts, *prompt.starts)):
        found = _reduced_for_rounding(prompt, most - most % 2)
    else:
        shared = prompt.starts[: same_start(kept.starts, prompt.starts)]
        found = max((at for at in shared if at <= most), default=0)
    return found if found >= settled else 0


def _reduced_for_rounding(prompt: PromptKey, found: int) -> int:
    """Return fewer tokens than `found` if the last prompt token would be rounded differently."""
    length, last = len(prompt.token_ids), prompt.starts[-1]
    if length % 2 == 0 or found <= last:
        return found
    if (length - last) % ATTENTION_BLOCK == 1:
        return last
    return found - 2 * ((length - found) % ATTENTION_BLOCK == 1)
