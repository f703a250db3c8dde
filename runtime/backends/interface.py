"""The interface of a loaded backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32

# Tokens. Prompts must be cut without a piece of one token, which smaller chunks cannot guarantee.
LEAST_CHUNK = 4
DAMAGED = "the weights or rows may be damaged: run stem-edge verify, or copy the bundle again"
LESS_MEMORY = (
    "shorten the prompt, or load with a smaller context_length or less memory for the row cache"
)
SIZES = (2, 4, 8)  # tokens of steps that are measured, and then taken
MOST = max(SIZES)  # tokens of a step
BEFORE = 64  # tokens before the steps that are measured
# Where a call may go on from kept keys and values and get the bits of a fresh call: at the start of
# a pair of tokens, only where a fresh call begins a step, or nowhere.
Resumes: TypeAlias = Literal["pairs", "steps", ""]
# From so many tokens on, the graph for prompts is the faster one: from 13 with SmolLM2-135M; from 8 with 1B
# (docs/lab). It is chosen by the whole prompt and not by the chunk, so that the chunk size changes no token.
PREFILL_FROM = 8


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured costs of decoding steps of several tokens."""

    seconds: float  # of a step of one token
    times: dict[int, float]  # tokens of a step -> its time beside that
    same_bits: bool  # whether a token's logits are the same as in a step alone
    same_in_batches: bool = False  # whether they are in a step of several sequences
    threads: int = 0  # of the backbone; 0: this process's threads


class BackendContext(Protocol):
    """Keys and values of one sequence."""

    length: int  # tokens it can hold

    @property
    def nbytes(self) -> int:
        """Bytes that the KV cache takes so far."""

    def nbytes_of(self, tokens: int) -> int:
        """Return the bytes that the KV cache takes once `tokens` tokens are in it."""

    @property
    def earliest(self) -> int:
        """Earliest position, other than 0, that a step can go back to; later ones may not need all."""

    def resumes(self, tokens: int) -> Resumes:
        """Return where a prompt of `tokens` tokens may go on from what this context has computed."""

    @property
    def settled(self) -> int:
        """Earliest position, other than 0, from where steps compute the same bits again."""

    def rest(self) -> None:
        """Free the logits of the latest step."""

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        """Return keys and values of the first tokens as views, an array for each layer and kind.

        Empty if this context has dropped some of them.
        """

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        """Copy what `kept` returned for `tokens` tokens into this context, which is empty."""

    def together(self, position: int) -> int:
        """Return the most tokens of a step at a position that drops what steps of one token would."""


class BackendDrafter(Protocol):
    """Drafts of a model's own assistant in one context, whose keys and values it reads."""

    def draft(self, token_id: int, position: int, count: int) -> list[int]:
        """Return the most probable tokens after the one at a position.

        That one is not computed yet, and the one before was among those with logits in the context's last
        step. Raises BackendError.
        """


class BackendPlaces:
    """Memory in which sequences that decode together lie side by side, in places 0, 1, ...

    This base class is for backends whose sequences decode together wherever they lie.
    """

    def join(self, context: BackendContext, tokens: int) -> None:
        """Move a context's first tokens to the next place. Raises OutOfMemoryError; all is then as before."""

    def leave(self, place: int, tokens: int) -> None:
        """Move a context's first tokens back to its own memory, and the last context to this place."""


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache. A step is `begin`, then `finish`."""

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens. Raises OutOfMemoryError."""

    def open_places(self, size: int, length: int) -> BackendPlaces | None:
        """Return places for up to `size` contexts of up to `length` tokens. Raises OutOfMemoryError.

        None if this backend cannot step several sequences together.
        """

    def open_drafter(self, context: Any) -> BackendDrafter | None:
        """Return what drafts in a context of this backend; None if no assistant is loaded."""

    def begin(
        self,
        contexts: Sequence[Any],
        token_ids: npt.NDArray[np.int64],
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step: the layers before any row.

        contexts [B]: of this backend; several must be in adjacent places, in this order. token_ids [B, T]: the
        next tokens of each. positions [B]: of each context's first one.

        prefill: use the graph for prompts, if the backend has one. apart: give each token the bits of a
        step of its own, if the backend can for T of SIZES and up to `together` tokens.
        """

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int) -> F32:
        """Complete the step with the remaining layers; its tokens' rows are in slots [B * T].

        Where rows are means, slots [B * T, window] are of the last tokens, EMPTY for those that lack.

        Layers that borrow K and V run for the last `logits` tokens of each context alone: slots of the
        others may lack the rows of these layers (ModelConfig.prompt_rows).
        Returns logits [B * logits, V] of the last tokens of each; the next step of these contexts may
        overwrite them. Raises BackendError; the step can then be tried again, together or one by one, as it can
        after logits that are not finite, and other contexts are intact.
        """

    def close(self) -> None:
        """Release the backbone."""
