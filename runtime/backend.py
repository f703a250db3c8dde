"""What an engine needs of whatever runs the backbone, and the choice among those that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stem_edge.bundle import Bundle
from stem_edge.quantize import F32
from stem_edge.runtime.cache import RowCache


class BackendContext(Protocol):
    """The KV cache of one generation."""

    length: int  # tokens it can hold

    def run(
        self,
        token_ids: npt.NDArray[np.int64],
        slot_ids: npt.NDArray[np.int32],
        position: int,
        logits_from: int,
    ) -> F32:
        """Process ids [T] at positions position..position+T-1; logits [T - logits_from, V].

        The logits may be overwritten by the next call.
        """


class Backend(Protocol):
    """A loaded backbone that reads rows from the slots of one row cache."""

    def open_context(self, length: int) -> BackendContext:
        """An empty context for up to `length` tokens."""

    def close(self) -> None:
        """Release the backbone."""


def open_backend(
    bundle: Bundle, cache: RowCache, threads: int, providers: Sequence[str] | None
) -> Backend:
    """The engine that can run this bundle. Raises BackendError when it is not installed."""
    from stem_edge.runtime.backend_ort import OrtBackend

    return OrtBackend(bundle, cache, threads, providers)
