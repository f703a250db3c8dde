"""What an engine needs of whatever runs the backbone."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from stem_edge.quantize import F32


class BackendContext(Protocol):
    """The KV cache of one generation. A step is one `begin` and one `finish`."""

    length: int  # tokens it can hold

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache, as it has grown so far."""

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """Take ids [T] at positions position..position+T-1 as far as no rows are needed.

        prefill: with the graph for prompts, if the backend has one.
        """

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int) -> F32:
        """Take the same tokens, whose rows are in slots [T], to their end.

        Returns logits [logits, V] of the last so many of them; the next call may overwrite them.
        """


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache."""

    def open_context(self, length: int) -> BackendContext:
        """An empty context for up to `length` tokens."""

    def close(self) -> None:
        """Release the backbone."""
