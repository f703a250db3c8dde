"""Memory that sequences take, in contexts and in places of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.prefixes.prefix import in_steps


class Sizes(NamedTuple):
    """Bytes of keys and values.

    nbytes_of: of so many tokens. length: most tokens of a sequence. fixed: whether the batch has
    taken the memory of its places, which only contexts of that length can join.
    """

    nbytes_of: Callable[[int], int]
    length: int
    fixed: bool

    def nbytes(self, tokens: int) -> int:
        """Return those of so many tokens, as steps take them."""
        return self.nbytes_of(min(in_steps(tokens), self.length))

    def context_length(self, request: Request) -> int:
        """Return how many tokens the context of a request has room for."""
        return self.length if self.fixed else request.length

    def place(self, request: Request) -> int:
        """Return those that a request takes in the batch."""
        return 0 if self.fixed else self.nbytes(request.length)
