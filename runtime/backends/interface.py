"""Protocols that each engine implements: its loader, loaded backbone and contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.costs import Needs, StepCosts
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout

# Where a call may continue after cached tokens and still compute the bits of a call without cache: at even
# positions, only where a call without cache begins a step, or nowhere.
Resumes: TypeAlias = Literal["pairs", "steps", ""]
# (id of a token, its position, number of drafts) -> drafts of the tokens after it
Drafter: TypeAlias = Callable[[int, int, int], list[int]]


class EngineLoader(Protocol):
    """Loads a bundle's backbone with one engine."""

    name: str  # of the engine or provider, in messages

    @property
    def step_costs(self) -> StepCosts | None:
        """Measured times of decoding steps; None if they were not measured. Call `prepare` first."""

    def prepare(self) -> None:
        """Do what `open` requires, such as saving repacked weights at a bundle's first load. May change `needs`."""

    def needs(self, context: int) -> Needs:
        """Return the memory needed for `context` tokens; may be called before `prepare`."""

    @property
    def slots(self) -> Callable[[RecordLayout, int], Slots]:
        """Class of row cache slots in this engine's format."""

    def open(self, slots: Any) -> Backend:
        """Load the backbone, which reads rows from `slots` (None for dense models). Raises BackendError."""


class BackendContext(Protocol):
    """KV cache of one sequence."""

    length: int  # tokens it can hold
    filled: int  # tokens that its memory was written for so far

    def nbytes_of(self, tokens: int) -> int:
        """Return the bytes that the KV cache takes once `tokens` tokens are in it."""

    @property
    def earliest(self) -> int:
        """Earliest position, other than 0, where a step still finds all tokens of its sliding windows."""

    def resumes(self, tokens: int) -> Resumes:
        """Return where a prompt of `tokens` tokens may continue after cached tokens."""

    @property
    def settled(self) -> int:
        """Fewest cached tokens that another prompt can reuse with the same bits; 0: any number."""

    def rest(self) -> None:
        """Free the logits of the latest step. Called when the context's answer has ended."""

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        """Return views of the keys and values of the first `tokens` tokens, two arrays for each layer.

        The list is empty if this context has dropped some of these tokens.
        """

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        """Fill this empty context with the arrays that `kept` returned for `tokens` tokens."""

    def together(self, position: int) -> int:
        """Return how many tokens a step at `position` can have before a window must drop tokens."""


class BackendPlaces:
    """Shared KV memory for sequences that decode together. Each place 0, 1, ... holds the KV cache of one sequence.

    This base class does nothing; it serves backends that need no such memory.
    """

    def join(self, context: Any, tokens: int) -> None:
        """Move a context's first `tokens` tokens to the next free place. OutOfMemoryError: nothing was moved."""

    def leave(self, place: int, tokens: int) -> None:
        """Move the first `tokens` tokens at `place` to their context's own memory, and the last context to `place`."""


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache. A step is `begin`, then `finish`."""

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens. Raises OutOfMemoryError."""

    def open_places(self, size: int, length: int) -> BackendPlaces | None:
        """Return shared KV memory for up to `size` contexts of `length` tokens. Raises OutOfMemoryError.

        Only contexts in this memory can decode together. Returns None if the backend decodes one sequence at a time.
        """

    def open_drafter(self, context: Any) -> Drafter | None:
        """Return a drafter for a context of this backend; None if no assistant (draft model) is loaded.

        It drafts tokens to follow a token that has not been computed yet. The context's last step gave
        logits of the token before it. The drafter raises BackendError.
        """

    def begin(
        self,
        contexts: Sequence[Any],
        token_ids: npt.NDArray[np.int64],
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step: run the layers before the first one that uses rows.

        contexts: B contexts of this backend; if B > 1, they have joined adjacent places (BackendPlaces) in this order.
        token_ids [B, T]: next tokens of each context. positions [B]: position of each context's first new token.

        prefill: use the graph for prompts, if the backend has one. apart: give each token the same bits as
        single-token steps, if the backend can. It cannot if T is not in costs.SIZES, or exceeds context.together().
        """

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int) -> F32:
        """Complete the step: run the other layers, with the tokens' rows in slots `slot_ids` [B * T].

        In models whose rows are means over a window of tokens, slot_ids is [B * T, window], with EMPTY for no token.
        Returns logits [B * logits, V]: of the last `logits` tokens of each context. The next step of these
        contexts may overwrite them. Layers that reuse an earlier layer's K and V run for these tokens only.

        Raises BackendError. Afterwards, or if logits are not finite, the step can be tried again, for all
        contexts or for one at a time; not on devices, after values that are not finite. Others are not affected.
        """

    def close(self) -> None:
        """Release the backbone."""
