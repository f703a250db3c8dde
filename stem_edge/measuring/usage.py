"""What is done with a bundle, and the memory that this is expected to take: of any engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """What is done with the bundle."""

    prompt_tokens: int
    new_tokens: int
    distinct_tokens: int  # of both together
    filled_slots: int  # of the row cache, in the end
    hit_rate: float  # of the row cache, while decoding

    @property
    def tokens(self) -> int:
        """In the context at the end."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Held:
    """Expected memory of a process, in bytes."""

    anonymous: int  # at its peak
    kv_cache: int
    mapped: int  # pages of the backbone's files at the end
    mapped_least: int  # those that decoding reads: what stays where not all fit
