"""A checked tokenizer.json, and the memory that loading it takes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from stem_edge.errors import MemoryPlanError
from stem_edge.shown import format_size
from stem_edge.system.memory import own_memory

SMALL_NBYTES = 16 << 20  # up to this, a later check, of the memory plan, has a better error


class TokenizerMemory(NamedTuple):
    """Bytes of memory that a loaded tokenizer takes, as measured with tokenizers 0.23."""

    kept: int  # once it is loaded
    loading: int  # at its peak while it loads

    def check(self, path: Path, limit: int) -> None:
        """Raise MemoryPlanError if loading would take this process's memory over `limit` bytes."""
        own = own_memory()
        if self.loading > SMALL_NBYTES and own + self.loading > limit:
            raise MemoryPlanError(
                f"memory of {format_size(limit)} is too small for {path}: loading this tokenizer takes "
                f"{format_size(self.loading, up=True)}, beside {format_size(own)} of this process; "
                "load it with more memory"
            )


class CheckedTokenizer(msgspec.Struct, frozen=True):
    """A tokenizer.json that passed all checks, with bounds on how much it can lengthen a text.

    growth: largest number of bytes that one byte of a text becomes.
    """

    json: bytes
    longest_nbytes: int  # bytes of the longest token in UTF-8
    growth: int
    special_tokens: tuple[str, ...]
    byte_level: bool  # True if tokens are written with one character for each byte
    memory: TokenizerMemory
