"""The interface of a loaded backbone, and checks of its logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.numerics.quantize import F32

# Tokens. Prompts must be cut without a piece of one token, which smaller chunks cannot guarantee.
LEAST_CHUNK = 4
DAMAGED = "the weights or rows may be damaged: run stem-edge verify, or copy the bundle again"
LESS_MEMORY = (
    "shorten the prompt, or load with a smaller context_length or less memory for the row cache"
)
SIZES = (2, 4, 8)  # tokens of steps that are measured, and then taken
MOST = max(SIZES)  # tokens of a step
BEFORE = 64  # tokens before the steps that are measured; a batch has copies of them
# Where a call may go on from kept keys and values and get the bits of a fresh call: at the start of
# a pair of tokens, only where a fresh call begins a step, or nowhere.
Resumes: TypeAlias = Literal["pairs", "steps", ""]
# From so many tokens on, the graph for prompts is the faster one: from 13 with SmolLM2-135M; from 8 with 1B
# (docs/measuring.md). It is chosen by the whole prompt and not by the chunk, so that the chunk size changes no token.
PREFILL_FROM = 8


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured costs of decoding steps of several tokens."""

    seconds: float  # of a step of one token
    times: dict[int, float]  # tokens of a step -> its time beside that
    same_bits: bool  # whether a token's logits are the same as in a step alone
    same_in_batches: bool = False  # whether they are in a step of several sequences
    threads: int = 0  # of the backbone; 0: this process's threads


class BackendContext(Protocol):
    """The KV cache of one generation. A step is one `begin` and one `finish`."""

    length: int  # tokens it can hold

    @property
    def nbytes(self) -> int:
        """Bytes that the KV cache takes so far."""

    def nbytes_of(self, tokens: int) -> int:
        """Bytes that the KV cache takes once `tokens` tokens are in it."""

    @property
    def earliest(self) -> int:
        """Earliest position, beside 0, that a step can go back to; later ones may not need all."""

    def resumes(self, tokens: int) -> Resumes:
        """Return where a prompt of `tokens` tokens may go on from what this context has computed."""

    @property
    def settled(self) -> int:
        """Earliest position, beside 0, to go back to so that steps compute the same bits."""

    def rest(self) -> None:
        """Free what steps have taken beside the KV cache; the next step takes it again."""

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        """Return keys and values of the first tokens as views, an array a layer and kind.

        Empty if this context has dropped some of them.
        """

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        """Copy what `kept` returned for `tokens` tokens into this context, which is empty."""

    def together(self, position: int) -> int:
        """Return how many tokens a step at a position may have to drop those that steps of one would."""

    def begin(
        self,
        token_ids: npt.NDArray[np.int64],
        position: int,
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step of ids [T] at positions position..position+T-1: the layers before any row.

        prefill: use the graph for prompts, if the backend has one. apart: give each token the bits of a
        step of its own, if the backend can for T of SIZES and up to `together` tokens.
        """

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int) -> F32:
        """Complete the step with the remaining layers; its tokens' rows are in slots [T].

        Where rows are means, slots [T, window] are of the last tokens, EMPTY for those that lack.

        Layers that borrow K and V run for the last `logits` tokens alone: slots of the others may
        lack the rows of these layers (ModelConfig.prompt_rows).
        Returns logits [logits, V] of the step's last tokens; the next call may overwrite them.
        They are finite. Raises BackendError; the same step can then be tried again, and other contexts are intact.
        """


class BackendBatch(Protocol):
    """Sequences that decode together, in places 0, 1, ...; a step takes one token of each.

    Each prompt is computed in a context, which then joins.
    """

    def join(self, context: BackendContext, tokens: int) -> None:
        """Add a context with its first tokens in the next place. It takes no step alone until it leaves.

        Raises OutOfMemoryError; the batch is then as before.
        """

    def leave(self, place: int) -> None:
        """Remove a context, with the tokens that it joined with; the last one moves to its place."""

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        """Start a step of the sequences in places first..first+n-1.

        token_ids, positions [n]: the token of each, and the place of that token in its text.
        """

    def finish(self, slot_ids: npt.NDArray[np.int32]) -> F32:
        """Complete the step; the tokens' rows are in slots [n], as of BackendContext.finish.

        Returns logits [n, V], a line for each sequence; else as BackendContext.finish, also when it
        raises: sequences can then be stepped again, together or one by one.
        """


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache."""

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens."""

    def open_batch(self, size: int, length: int) -> BackendBatch | None:
        """Return an empty batch for up to `size` sequences of up to `length` tokens.

        None if this backend cannot step several sequences together.
        """

    def close(self) -> None:
        """Release the backbone."""


class NotFiniteError(BackendError):
    """Logits contain NaN or infinities."""


def check_logits(logits: F32, position: int) -> F32:
    """Return logits [n, V] unchanged; raise NotFiniteError for NaN and inf. position: of the first.

    -inf is refused, too: no finite weights give it on purpose, so a token chosen by such logits
    would mean nothing. Takes about 13 microseconds for 128,256 logits.
    """
    if not logits.size or (np.isfinite(logits.min()) and np.isfinite(logits.max())):
        return logits
    wrong = ~np.isfinite(logits)
    first = int(wrong.any(axis=1).argmax())
    raise NotFiniteError(
        f"{int(wrong[first].sum()):,} of {logits.shape[1]:,} logits at position {position + first} "
        f"are not finite; {DAMAGED}"
    )
