"""What each engine implements: a loaded backbone, its contexts and its drafter; and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.bundle.footprint import Footprint
from stem_edge.numerics.quantize import F32

# Fewest tokens in a chunk of a prompt: smaller chunks could leave a last chunk of one token.
LEAST_CHUNK = 4
DAMAGED = "the weights or rows may be damaged: run stem-edge verify, or copy the bundle again"
LESS_MEMORY = (
    "shorten the prompt, or load with a smaller context_length or less memory for the row cache"
)
SIZES = (2, 4, 8)  # sizes of multi-token decoding steps, in tokens: measured, and then used
MOST = max(SIZES)  # tokens of the largest such step
BEFORE = 64  # tokens in the context before the steps that are measured
# Where a call may go on from cached keys and values and get the bits of a fresh call: at the start of
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


@dataclass(frozen=True)
class Part:
    """Bytes that a backbone needs in the memory of this process, or of a device."""

    weights: int  # without those read in place from their file
    kv_cache: int  # of a full context
    fixed: int  # activations of any chunk
    chunk_token: int  # further activations, for each token of a chunk
    logits: int  # further, for each position with logits, if more than one
    later: int = 0  # of the weights: graphs that are opened when they are first needed

    def activations(self, chunk: int, sequences: int) -> int:
        """Bytes of activations: of a prompt chunk, or of a step that decodes all sequences, if larger."""
        step = sequences * (self.chunk_token + self.logits) if sequences > 1 else 0
        return self.fixed + max(chunk * self.chunk_token, step)


@dataclass(frozen=True)
class Needs:
    """Memory that a loader needs for its backbone, and the settings that determine it."""

    footprint: Footprint
    context_length: int
    host: Part
    device: Part | None = None  # on a device, which then holds weights, KV cache and activations
    device_limit: int | None = None  # bytes that may be taken there; None without a limit
    shared: bool = False  # the device has no memory itself, so it takes this process's memory
    provider: str = "cpu"  # onnxruntime's execution provider
    mapped: int = 0  # bytes of weights that every token reads in mapped files
    prefill: bool = False  # the graph for prompts is loaded, too
    preparing: str = ""  # what preparing takes, which is still to be done for that

    @property
    def records(self) -> int:
        """Number of records in the model's tables; 0 without tables."""
        tables = self.footprint.tables
        return 0 if tables is None else tables.records

    def rows(self, tokens: int) -> int:
        """Most rows that a step of `tokens` tokens looks up; some models also need rows of earlier tokens."""
        model = self.footprint.model
        return tokens * model.lookups + max(0, model.row_window - 1)


class BackendContext(Protocol):
    """KV cache of one sequence."""

    length: int  # tokens it can hold

    @property
    def nbytes(self) -> int:
        """Bytes that the KV cache takes so far."""

    def nbytes_of(self, tokens: int) -> int:
        """Return the bytes that the KV cache takes once `tokens` tokens are in it."""

    @property
    def earliest(self) -> int:
        """Earliest position, other than 0, that a step can go back to."""

    def resumes(self, tokens: int) -> Resumes:
        """Return at which positions a prompt of `tokens` tokens may reuse this context."""

    @property
    def settled(self) -> int:
        """Earliest position, other than 0, from where steps compute the same bits again."""

    def rest(self) -> None:
        """Free the logits of the latest step."""

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        """Return views of the first tokens' keys and values, two arrays for each layer.

        The list is empty if this context has dropped some of these tokens.
        """

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        """Fill this empty context with the arrays that `kept` returned for `tokens` tokens."""

    def together(self, position: int) -> int:
        """Return the largest step at a position that evicts the same tokens as single-token steps."""


class BackendDrafter(Protocol):
    """Drafts tokens with a model's own assistant, which reads the keys and values of one context."""

    def draft(self, token_id: int, position: int, count: int) -> list[int]:
        """Return `count` draft tokens to follow `token_id`, the token at `position`.

        `token_id` has not been computed yet. The context's last step gave logits of the token before it.
        Raises BackendError.
        """


class BackendPlaces:
    """Memory with numbered places (0, 1, ...) for the KV caches of sequences that decode together.

    This base class does nothing; it serves backends that need no such memory.
    """

    def join(self, context: BackendContext, tokens: int) -> None:
        """Move a context's first tokens to the next place. If it raises OutOfMemoryError, nothing has moved."""

    def leave(self, place: int, tokens: int) -> None:
        """Move a context's first tokens back to its own memory. The last context moves to its place."""


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache. A step is `begin`, then `finish`."""

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens. Raises OutOfMemoryError."""

    def open_places(self, size: int, length: int) -> BackendPlaces | None:
        """Return places for up to `size` contexts of up to `length` tokens. Raises OutOfMemoryError.

        Returns None if this backend cannot decode several sequences in one step.
        """

    def open_drafter(self, context: Any) -> BackendDrafter | None:
        """Return a drafter for a context of this backend; None if no assistant is loaded."""

    def begin(
        self,
        contexts: Sequence[Any],
        token_ids: npt.NDArray[np.int64],
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step: run the layers that need no row yet.

        contexts: B contexts of this backend; if B > 1, they lie in adjacent places, in this order. token_ids
        [B, T]: the next tokens of each context. positions [B]: position of each context's first token here.

        prefill: use the graph for prompts, if the backend has one. apart: give each token the same bits as
        single-token steps, if the backend can; it cannot if T is not in SIZES or exceeds `together`.
        """

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int) -> F32:
        """Complete the step: run the other layers, with the tokens' rows in slots `slot_ids` [B * T].

        In models whose rows are means over a window of tokens, slot_ids is [B * T, window]; EMPTY: no token.
        Returns logits [B * logits, V]: of the last `logits` tokens of each context. The next step of these
        contexts may overwrite them. Layers that borrow K and V run for these tokens only, so the slots of
        the other tokens may lack the rows of these layers (ModelConfig.prompt_rows).

        Raises BackendError. Afterwards, or if logits are not finite, the step can be tried again, for all
        contexts or for one at a time. Other contexts are not affected.
        """

    def close(self) -> None:
        """Release the backbone."""
