"""A context: keys and values of a sequence, the prompt that they came from, and their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.backends.interface import PREFILL_FROM, BackendContext
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


NO_PROMPT = PromptKey((), {}, ())


def in_steps(tokens: int) -> int:
    """Round a number of tokens up to a page: the system commits keys and values page by page, per head."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


class Context:
    """A sequence's keys and values, with the prompt that it computed or is computing."""

    def __init__(self, backend: BackendContext, prompt: PromptKey = NO_PROMPT) -> None:
        self.backend, self.prompt = backend, prompt
        self.position = 0  # tokens processed
        self.joined = False  # whether its keys and values lie beside others
        self.length = backend.length  # tokens that its generation may process
        self.nbytes = 0  # of its KV cache, now or before long
        self.reserved = 0  # tokens that fit in nbytes

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.length - self.position

    @property
    def together(self) -> int:
        """Tokens that the next step may have if each is to get the bits of a step of its own."""
        return min(self.room, self.backend.together(self.position))

    def rewind(self, position: int) -> None:
        """Go back to a position, or to the start if its window has left the KV cache."""
        self.position = position if position >= self.backend.earliest else 0

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

    def go_on(self, prompt: PromptKey, tokens: int) -> None:
        """Become the context of another prompt; its first `tokens` tokens are here."""
        self.rewind(tokens)  # first, because another thread may copy from here
        self.prompt = prompt

    def copy(self, other: Context, tokens: int) -> None:
        """Take over the first tokens of another context into this one, which is empty."""
        if arrays := other.backend.kept(tokens) if tokens else []:
            self.backend.restore(arrays, tokens)
            self.position = tokens

    def settle(self) -> None:
        """Count the memory that the context has, once its call has ended."""
        self.backend.rest()
        self.nbytes, self.reserved = self.backend.nbytes, 0
        self.reserve(self.position)

    def reserve(self, tokens: int) -> None:
        """Count the memory that the context takes once it has `tokens` tokens.

        Never less than before, because going back to an earlier position frees none.
        """
        if tokens > self.reserved:
            self.reserved = in_steps(tokens)
            nbytes = self.backend.nbytes_of(min(self.reserved, self.backend.length))
            self.nbytes = max(self.nbytes, nbytes)
