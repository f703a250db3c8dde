"""A context with its prompt, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.backends.interface import PREFILL_FROM, BackendContext
from stem_edge.runtime.engine import Context
from stem_edge.tables.rows import RowLookup


@dataclass(frozen=True)
class PromptKey:
    """All that the keys and values of a prompt follow from, in one loaded model."""

    token_ids: Sequence[int]
    lookups: Mapping[int, RowLookup]  # at places that do not look up their token's own record
    starts: Sequence[int]  # where a fresh call begins its steps, ascending from 0

    @property
    def prefill(self) -> bool:
        """Tell whether the graph for prompts computes it, where there is one."""
        return len(self.token_ids) >= PREFILL_FROM


def in_steps(tokens: int) -> int:
    """Round up what memory is counted for, because it is provided in pages with tokens of one head."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


class Prefix(Context):
    """A context with the prompt that it computed, or is computing."""

    def __init__(self, prompt: PromptKey, backend: BackendContext) -> None:
        super().__init__(backend)
        self.prompt = prompt
        self.nbytes = 0  # of its KV cache, now or before long
        self.reserved = 0  # tokens that fit in nbytes
        self.rested = True  # False once steps took memory in addition to the KV cache

    @property
    def computed(self) -> int:
        """Number of tokens of the prompt with computed keys and values."""
        return min(self.position, len(self.prompt.token_ids))

    @property
    def useful(self) -> bool:
        """True if a later prompt may go on from here: no window has dropped the prompt."""
        gone = max(self.backend.settled, self.backend.earliest)
        return self.computed > 0 and self.computed >= gone

    @property
    def growth(self) -> int:
        """Bytes that its call may still take beyond those counted."""
        tokens = min(in_steps(self.length), self.backend.length)
        return max(0, self.backend.nbytes_of(tokens) - self.nbytes)

    def reusable(self, prompt: PromptKey) -> int:
        """Return how many tokens another prompt can take over from this context."""
        from stem_edge.runtime.prefixes.reuse import reusable  # where anything is cached

        resumes = self.backend.resumes(len(prompt.token_ids))
        return reusable(self.prompt, self.computed, prompt, resumes, self.backend.settled)

    def go_on(self, prompt: PromptKey, tokens: int) -> None:
        """Become the context of another prompt; its first `tokens` tokens are here."""
        self.rewind(tokens)  # first, because another thread may copy from here
        self.prompt = prompt

    def copy(self, other: Prefix, tokens: int) -> None:
        """Take over the first tokens of another context into this one, which is empty."""
        if arrays := other.backend.kept(tokens) if tokens else []:
            self.backend.restore(arrays, tokens)
            self.position = tokens

    def settle(self) -> None:
        """Count the memory that the context has, once its call has ended."""
        self.nbytes, self.reserved, self.rested = self.backend.nbytes, 0, False
        self.reserve(self.position)

    def rest(self) -> None:
        """Free what steps took in addition to the KV cache, if that was not done. Raises OutOfMemoryError."""
        if not self.rested:
            self.backend.rest()
            self.rested = True

    def reserve(self, tokens: int) -> None:
        """Count the memory that the context takes once it has `tokens` tokens.

        Never less than before, because going back to an earlier position frees none.
        """
        if tokens > self.reserved:
            self.reserved = in_steps(tokens)
            nbytes = self.backend.nbytes_of(min(self.reserved, self.backend.length))
            self.nbytes = max(self.nbytes, nbytes)
