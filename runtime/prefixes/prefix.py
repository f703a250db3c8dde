"""A context with its prompt, and what is counted of its memory."""

from __future__ import annotations

from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.engine import Context
from stem_edge.runtime.prefixes.reuse import Prompt, reusable


def in_steps(tokens: int) -> int:
    """Round up what memory is counted for, because it is provided in pages with tokens of one head."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


class Prefix:
    """A context with the prompt that it computed, or is computing."""

    def __init__(self, prompt: Prompt, context: Context) -> None:
        self.prompt, self.context = prompt, context
        self.nbytes = 0  # of its KV cache, now or before long
        self._reserved = 0  # tokens for which that suffices

    @property
    def computed(self) -> int:
        """Tokens of the prompt whose keys and values are there, as far as a prompt's."""
        return min(self.context.position, len(self.prompt.token_ids))

    @property
    def growth(self) -> int:
        """Bytes that its call may still take beyond those counted."""
        backend = self.context.backend
        tokens = min(in_steps(self.context.length), backend.length)
        return max(0, backend.nbytes_of(tokens) - self.nbytes)

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens another prompt can take over from this context."""
        backend = self.context.backend
        resumes = backend.resumes(len(prompt.token_ids))
        return reusable(self.prompt, self.computed, prompt, resumes, backend.settled)

    def go_on(self, prompt: Prompt, tokens: int) -> None:
        """Become the context of another prompt, whose first `tokens` tokens are there."""
        self.prompt = prompt
        self.context.rewind(tokens)

    def reserve(self, tokens: int) -> None:
        """Count the memory that the context takes once it has `tokens` tokens.

        Never less than before, because going back to an earlier position frees none.
        """
        if tokens > self._reserved:
            self._reserved = in_steps(tokens)
            backend = self.context.backend
            self.nbytes = backend.nbytes_of(min(self._reserved, backend.length))


class Reservation:
    """Bytes that a sequence of a batch takes beside contexts, until it is released or dropped."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the bytes back; takes no lock."""
        self.nbytes = 0
