"""Who decides on the codes of a quantized matrix: the range of each block, or a search.

stem_edge.export.calibrated has those that look at a text, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from stem_edge.block_search import search_blocks
from stem_edge.quantize import F32, Blocks, quantize_asymmetric, quantize_blocks

Work: TypeAlias = Callable[[F32], Blocks]  # rows [n, K] of a matrix -> their codes


class Quantizer(Protocol):
    """Asked for each product in the order in which data flows through the model."""

    def worker(self, name: str, kind: str, bits: int, block: int) -> Work:
        """What quantizes rows of the product `name`; it may be called from any thread."""

    def keep(self, name: str, stored: F32) -> None:
        """Take note of what rows [n, K] of a product have become, in their order."""


class Rounding:
    """To the nearest code, scales from the range of each block."""

    def __init__(self, *, asymmetric: bool) -> None:
        self._asymmetric = asymmetric

    def worker(self, name: str, kind: str, bits: int, block: int) -> Work:
        """The same for all."""
        if self._asymmetric:
            return lambda rows: quantize_asymmetric(rows, bits, block)
        return lambda rows: Blocks(*quantize_blocks(rows, bits, block))

    def keep(self, name: str, stored: F32) -> None:
        """Not needed."""


class Searching:
    """To the nearest code, scales from stem_edge.block_search."""

    def __init__(self, *, asymmetric: bool) -> None:
        self._asymmetric = asymmetric

    def worker(self, name: str, kind: str, bits: int, block: int) -> Work:
        """The same for all."""
        return lambda rows: search_blocks(rows, bits, block, asymmetric=self._asymmetric)

    def keep(self, name: str, stored: F32) -> None:
        """Not needed."""
