"""How much of a computed prompt a later prompt can take over, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stem_edge.runtime.backends.interface import Resumes
from stem_edge.runtime.text.codec import same_start

if TYPE_CHECKING:
    from stem_edge.runtime.backends.context import Context, PromptKey

LEAST_COMPUTED = 2
# onnxruntime's attention takes the tokens of a step in blocks of a multiple of this number, and
# rounds a block of a single token otherwise.
ATTENTION_BLOCK = 16


def reusable_of(context: Context, prompt: PromptKey) -> int:
    """Return how many tokens a prompt can take over from a context."""
    backend = context.backend
    resumes = backend.resumes(len(prompt.token_ids))
    return reusable(context.prompt, context.computed, prompt, resumes, backend.settled)


def reusable(
    kept: PromptKey, computed: int, prompt: PromptKey, resumes: Resumes, settled: int = 0
) -> int:
    """Return how many first tokens of `prompt` have in `kept` the bits that a fresh call gives.

    computed: tokens of `kept` with keys and values. resumes, settled: of its context.

    A fresh call gives the same bits where the same kernels run on the same ids and rows. So
    - up to there, ids and lookups are the same, and both prompts use the same graph;
    - two tokens or more are left, because kernels round an unpaired one otherwise (engine.starts_of);
    - "pairs": the number is even, as is the start of every step, so that pairs are the same;
    - "steps": the tokens of a step choose kernels, too, or what a window has dropped.
      Then both prompts begin a step there, and all their steps before are the same.
    """
    if not resumes or not prompt.token_ids or kept.prefill != prompt.prefill:
        return 0
    alike = same_start(kept.token_ids, prompt.token_ids)
    places = kept.lookups.keys() | prompt.lookups.keys()
    changed = (at for at in places if kept.lookups.get(at) != prompt.lookups.get(at))
    most = max(0, min(computed, len(prompt.token_ids) - LEAST_COMPUTED, alike, *changed))
    if resumes == "pairs" and not any(at % 2 for at in (*kept.starts, *prompt.starts)):
        found = _with_the_same_last_token(prompt, most - most % 2)
    else:
        shared = prompt.starts[: same_start(kept.starts, prompt.starts)]
        found = max((at for at in shared if at <= most), default=0)
    return found if found >= settled else 0


def _with_the_same_last_token(prompt: PromptKey, found: int) -> int:
    """Return up to `found` tokens, such that no unpaired last token is alone in one call only."""
    length, last = len(prompt.token_ids), prompt.starts[-1]
    if length % 2 == 0 or found <= last:
        return found
    if (length - last) % ATTENTION_BLOCK == 1:
        return last
    return found - 2 * ((length - found) % ATTENTION_BLOCK == 1)
