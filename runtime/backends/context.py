"""A context: the KV cache of one sequence, its prompt, and the bytes that the cache takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.backends.costs import PREFILL_FROM
from stem_edge.tables.rows import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import BackendContext


@dataclass(frozen=True)
class PromptKey:
    """Key of a cached prompt: all that its keys and values depend on.

    starts: where steps begin if nothing is cached.
    """

    token_ids: Sequence[int]
    lookups: Mapping[int, RowLookup]  # position -> rows to look up there instead of the token's own
    starts: Sequence[int]  # ascending

    @property
    def prefill(self) -> bool:
        """True if the prompt is long enough for the prefill graph, if the model has one."""
        return len(self.token_ids) >= PREFILL_FROM


NO_PROMPT = PromptKey((), {}, ())


def in_steps(tokens: int) -> int:
    """Round a token count up to a multiple of STEP_TOKENS: the OS commits KV memory by pages."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


class Context:
    """KV cache of one sequence, and the prompt that is in the cache or being computed into it."""

    def __init__(self, backend: BackendContext, prompt: PromptKey) -> None:
        self.backend, self.prompt = backend, prompt
        self.position = 0  # tokens processed
        self.joined = False  # True while a batch decodes this context
        self.length = backend.length  # most tokens of prompt and answer together
        self.reserved = 0  # tokens that its KV cache has memory for, or is about to have

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the context."""
        return self.length - self.position

    @property
    def together(self) -> int:
        """Largest size of the next step, in tokens, that can compute the same bits as single-token steps."""
        return min(self.room, self.backend.together(self.position))

    def rewind(self, position: int) -> None:
        """Go back to `position`, or to 0 if the KV cache has dropped tokens that a step at `position` attends to."""
        self.position = position if position >= self.backend.earliest else 0

    @property
    def computed(self) -> int:
        """Number of prompt tokens whose keys and values have been computed."""
        return min(self.position, len(self.prompt.token_ids))

    @property
    def useful(self) -> bool:
        """True if later prompts can reuse this context: no sliding window has dropped its computed tokens."""
        gone = max(self.backend.settled, self.backend.earliest)
        return self.computed > 0 and self.computed >= gone

    @property
    def growth(self) -> int:
        """Most bytes that the KV cache can still add to `nbytes` until the context is full."""
        return max(0, self._nbytes_of(in_steps(self.length)) - self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that the KV cache takes, or is about to take. Going back to an earlier position frees none."""
        return self._nbytes_of(max(self.reserved, self.backend.filled))

    def _nbytes_of(self, tokens: int) -> int:
        return self.backend.nbytes_of(min(tokens, self.backend.length))

    def copy(self, other: Context | None, tokens: int) -> None:
        """Fill this empty context with the keys and values of the first `tokens` tokens of `other`.

        This context stays empty if `other` is None or has dropped some of these tokens.
        """
        if arrays := [] if other is None else other.backend.kept(tokens):
            self.backend.restore(arrays, tokens)
            self.position = tokens

    def settle(self) -> None:
        """Free the latest logits, and reserve no more memory than the tokens that are in the KV cache need."""
        self.backend.rest()
        self.reserved = in_steps(self.position)

    def reserve(self, tokens: int) -> None:
        """Count the memory that the context needs for `tokens` tokens."""
        if tokens > self.reserved:
            self.reserved = in_steps(tokens)
