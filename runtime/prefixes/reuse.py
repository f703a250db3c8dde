"""How much of an earlier prompt's keys and values a later prompt can take over, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stem_edge.bundle.prefill_check import PREFILL_FROM
from stem_edge.runtime.backends.interface import Resumes
from stem_edge.runtime.text.codec import same_start
from stem_edge.tables.lookup import RowLookup

LEAST_COMPUTED = 2
# onnxruntime's attention takes the tokens of a step in blocks of a multiple of so many, and rounds a
# block of a single token otherwise.
ATTENTION_BLOCK = 16


@dataclass(frozen=True)
class Prompt:
    """All that the keys and values of a prompt follow from, in one loaded model."""

    token_ids: Sequence[int]
    lookups: Mapping[int, RowLookup]  # at places that do not look up their token's own record
    starts: Sequence[int]  # where a fresh call begins its steps, ascending from 0

    @property
    def prefill(self) -> bool:
        """Tell whether the graph for prompts computes it, where there is one."""
        return len(self.token_ids) >= PREFILL_FROM


def reusable(
    kept: Prompt, computed: int, prompt: Prompt, resumes: Resumes, settled: int = 0
) -> int:
    """Return how many first tokens of `prompt` have in `kept` the bits that a fresh call gives.

    computed: tokens of `kept` whose keys and values are there. resumes, settled: of its context.

    A fresh call gives the same bits where the same kernels run on the same ids and rows. So
    - up to there, ids and lookups are the same, and both prompts use the same graph;
    - two tokens or more are left, because kernels round an unpaired one otherwise (engine.cut);
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


def _with_the_same_last_token(prompt: Prompt, found: int) -> int:
    """Return up to `found` tokens, such that no unpaired last token is alone in one call only."""
    length, last = len(prompt.token_ids), prompt.starts[-1]
    if length % 2 == 0 or found <= last:
        return found
    if (length - last) % ATTENTION_BLOCK == 1:
        return last
    return found - 2 * ((length - found) % ATTENTION_BLOCK == 1)
