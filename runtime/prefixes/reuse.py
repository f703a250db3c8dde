"""How many tokens of a cached prompt a later prompt can reuse without changing any bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stem_edge.runtime.backends.interface import Resumes
from stem_edge.runtime.text.codec import same_start

if TYPE_CHECKING:
    from stem_edge.runtime.backends.context import Context, PromptKey

LEAST_COMPUTED = 2
# onnxruntime's attention takes the tokens of a step in blocks of a multiple of this number, and
# rounds a block of a single token differently.
ATTENTION_BLOCK = 16


def reusable_of(context: Context, prompt: PromptKey) -> int:
    """Return how many tokens of a context a prompt can reuse."""
    backend = context.backend
    resumes = backend.resumes(len(prompt.token_ids))
    return reusable(context.prompt, context.computed, prompt, resumes, backend.settled)


def reusable(
    kept: PromptKey, computed: int, prompt: PromptKey, resumes: Resumes, settled: int = 0
) -> int:
    """Return how many first tokens of `kept` a call for `prompt` can reuse without changing bits.

    computed: number of tokens of `kept` with keys and values. resumes, settled: see BackendContext.

    Reuse of n tokens changes no bits if the same kernels run on the same ids and rows as in a fresh call. So
    - the first n ids and lookups are the same, and both prompts use the same graph;
    - two tokens or more remain, because kernels round an unpaired token differently (engine.starts_of);
    - if `resumes` is "pairs", n is even, as is the start of every step, so that pairs are the same;
    - if it is "steps", kernels also depend on a step's tokens, or on tokens that a window has dropped.
      Then both prompts begin a step at n, and all earlier steps are the same.
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
    """Reduce `found` until both calls, or neither, put an unpaired last token in its own block."""
    length, last = len(prompt.token_ids), prompt.starts[-1]
    if length % 2 == 0 or found <= last:
        return found
    if (length - last) % ATTENTION_BLOCK == 1:
        return last
    return found - 2 * ((length - found) % ATTENTION_BLOCK == 1)
