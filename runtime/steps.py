"""Steps: which tokens are processed at once, known ones and guesses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from stem_edge.numerics.quantize import I64
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.rows.cache import EMPTY
from stem_edge.runtime.rows.prefetch import NO_IDS


def starts_of(tokens: int, size: int) -> list[int]:
    """Return where steps of up to `size` begin, so that logits are the same for any size from 4 on.

    Where a window has dropped tokens from the KV cache, and where that is float16 on onnxruntime,
    that holds but for rounding.

    Kernels compute tokens in pairs and round an unpaired one differently. So chunks are even, and
    the last one has more than one token unless the prompt itself is a single token.
    """
    if size >= LEAST_CHUNK:
        size -= size % 2
    starts = list(range(0, tokens, size))
    if size >= LEAST_CHUNK and len(starts) > 1 and starts[-1] == tokens - 1:
        starts[-1] -= 2
    return starts


def cut(token_ids: I64, size: int) -> list[I64]:
    """Split ids into chunks that begin where starts_of says."""
    starts = starts_of(len(token_ids), size)
    return [token_ids[at:end] for at, end in pairwise([*starts, len(token_ids)])]


class Step(NamedTuple):
    """Tokens to process at once."""

    token_ids: I64  # [T]
    row_ids: I64  # [T], the rows that they look up, or [T, ...] of several (RowKeys)
    logits: int  # of how many of the last tokens logits are wanted
    later: I64 = NO_IDS  # rows that the next steps look up, as far as they are known

    @property
    def records(self) -> int:
        """Distinct rows."""
        return len(set(self.row_ids.ravel().tolist()) - {EMPTY})


class Guesses:
    """Drafts for one answer; this base class makes no drafts."""

    quick = True  # whether a token may wait for what follows it

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        """Return guesses at what follows the prompt and answer so far: at most `room` tokens.

        `seen` begins with the `seen` of the previous call.
        """
        return []


NO_GUESSES = Guesses()
