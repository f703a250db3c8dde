"""What an engine needs of whatever runs the backbone."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError, DeviceLostError, OutOfMemoryError
from stem_edge.numerics.quantize import F32

# Tokens: a prompt is cut so that no piece is one token alone, which shorter pieces cannot promise.
LEAST_CHUNK = 4
DAMAGED = "the weights or rows may be damaged: run stem-edge verify, or copy the bundle again"
LESS_MEMORY = (
    "shorten the prompt, or load with a smaller context_length or less memory for the row cache"
)
MAX_REASON = 300  # characters of what an engine says
# Of onnxruntime, CUDA and WebGPU.
NO_MEMORY = (
    "bad_alloc",
    "allocate memory",
    "out of memory",
    "ALLOC_FAILED",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_HOST_MEMORY",
    "out_of_memory",
)
LOST = (
    "device lost",
    "device is lost",
    "DEVICE_LOST",
    "DXGI_ERROR_DEVICE_REMOVED",
    "unspecified launch failure",
)


class BackendContext(Protocol):
    """The KV cache of one generation. A step is one `begin` and one `finish`."""

    length: int  # tokens it can hold

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache, as it has filled so far."""

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """Take ids [T] at positions position..position+T-1 as far as no rows are needed.

        prefill: with the graph for prompts, if the backend has one.
        """

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """Take the same tokens, whose rows are in slots [T], to their end.

        Returns logits [logits, V] of the last so many of them; the next call may overwrite them.
        They are finite; but where `top` is not 0, only that many of the largest are wanted, and a
        backend that would have to fetch the others from a device may give -inf for them. Raises
        BackendError, after which the same step can be tried again, and other contexts are as they
        were.
        """


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache."""

    def open_context(self, length: int) -> BackendContext:
        """An empty context for up to `length` tokens."""

    def close(self) -> None:
        """Release the backbone."""


class NotFiniteError(BackendError):
    """Logits are not numbers."""


def check_logits(logits: F32, position: int) -> F32:
    """The same logits [n, V], whose first position is this; raises BackendError for NaN and inf.

    Also for -inf, which no finite weights give on purpose: no token can be chosen by such logits
    in a way that means anything. Takes about 13 microseconds for 128,256 logits.
    """
    if not logits.size or (np.isfinite(logits.min()) and np.isfinite(logits.max())):
        return logits
    wrong = ~np.isfinite(logits)
    first = int(wrong.any(axis=1).argmax())
    raise NotFiniteError(
        f"{int(wrong[first].sum()):,} of {logits.shape[1]:,} logits at position {position + first} "
        f"are not finite numbers, expected all to be; {DAMAGED}"
    )


def reason(error: Exception) -> str:
    """What an engine says went wrong, on one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in said)[:MAX_REASON]


def check_memory(error: Exception, doing: str) -> None:
    """Raises OutOfMemoryError if that is what an engine's error means: it has no type of its own."""
    said = str(error)
    if isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY):
        raise OutOfMemoryError(
            f"no memory left {doing} ({reason(error)}); {LESS_MEMORY}"
        ) from error


def check_lost(error: Exception, doing: str) -> None:
    """Raises DeviceLostError if the device is gone."""
    if any(words.lower() in str(error).lower() for words in LOST):
        raise DeviceLostError(
            f"the device was lost {doing} ({reason(error)}); close the model and load it again"
        ) from error


def check_device(error: Exception, doing: str) -> None:
    """As check_memory and check_lost."""
    check_memory(error, doing)
    check_lost(error, doing)
