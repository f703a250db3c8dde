"""Quantizers of the backbone for onnxruntime, with or without a calibration text.

With a text, its hidden states go through the model layer by layer while the matrices are quantized.
Each layer sees what the quantized layers before it make of the text, so that it makes up for their
errors, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.head_padding import pad_heads
from stem_edge.export.quantization.gptq import inverse_factor, solve
from stem_edge.export.quantization.hidden_states import HEAD, HiddenStates, damped, squares
from stem_edge.numerics.block_search import search_blocks
from stem_edge.numerics.matrix import ArrayMatrix, whole
from stem_edge.numerics.quantize import F32, Blocks, quantize_asymmetric, quantize_blocks

Positions: TypeAlias = npt.NDArray[np.intp]
Quantize: TypeAlias = Callable[[F32], Blocks]  # rows [n, K] of a matrix -> their codes

# Product of a layer -> the matrices that it stacks, in order.
STACKED = {"qkv": ("wq", "wk", "wv")}


class Quantizer:
    """Quantizer to the nearest code, with scales from the range of each block or from a search.

    It is asked for one product after the other, in the order in which data flows through the model.
    """

    def __init__(self, *, asymmetric: bool, search: bool) -> None:
        self._asymmetric, self._search = asymmetric, search

    def worker(self, name: str, kind: str, bits: int, block: int) -> Quantize:
        """Return a function that quantizes rows of the product `name`, in any thread."""
        if self._search:
            return lambda rows: search_blocks(rows, bits, block, asymmetric=self._asymmetric)
        if self._asymmetric:
            return lambda rows: quantize_asymmetric(rows, bits, block)
        return lambda rows: Blocks(*quantize_blocks(rows, bits, block))

    def keep(self, name: str, stored: F32) -> None:
        """Receive what rows [n, K] of a product have become, in their order."""


class Calibrated(Quantizer):
    """Quantizer that weights input channels by their mean square, or uses GPTQ."""

    def __init__(
        self,
        states: HiddenStates,
        config: ModelConfig,
        *,
        asymmetric: bool,
        gptq: bool,
        tell: Callable[[str], object] = lambda what: None,
    ) -> None:
        super().__init__(asymmetric=asymmetric, search=True)
        self._states, self._config, self._tell = states, config, tell
        self._gptq = gptq
        self._moments: dict[str, F32] = {}  # input -> sum of x x^T [K, K], or of x^2 [K]
        self._factors: dict[str, F32] = {}  # input -> U [K, K] of gptq.solve
        self._stored: dict[str, list[F32]] = {}  # product of this layer -> its rows so far
        self._seen = -1  # layer whose inputs are in `_moments`

    def worker(self, name: str, kind: str, bits: int, block: int) -> Quantize:
        """Run the text up to this product, then return its quantizer."""
        # The matrices before the layers: one is not multiplied, the others have 8 bits.
        if kind in ("embedding", "altup_in"):
            return super().worker(name, kind, bits, block)
        source = HEAD if kind == "head" else name.replace(".up", ".gate")
        after = kind in ("altup_out", "head")
        self._go_to(self._config.n_layers if after else int(name.split(".")[1]))
        if self._gptq:
            factor = self._factor(source)
            return lambda rows: solve(rows, factor, bits, block, asymmetric=self._asymmetric)
        weights = damped(self._moments[source])
        return lambda rows: search_blocks(rows, bits, block, weights, asymmetric=self._asymmetric)

    def keep(self, name: str, stored: F32) -> None:
        """Keep a layer's rows, because the text goes through them to the next layer."""
        # Without the context: it is stored at 8 bits for many layers at once, so that the next
        # layer would hardly see its errors.
        if name.startswith("layers.") and not name.endswith(".ple_context"):
            self._stored.setdefault(name, []).append(stored)

    def _go_to(self, layer: int) -> None:
        while self._states.layer < layer:
            self._tell(f"running the text through layer {self._states.layer}")
            self._moments, self._factors = {}, {}
            self._states.advance(self._unpadded())
            self._stored = {}
        if self._seen == layer:
            return
        self._tell(f"looking into layer {layer}")
        if layer == self._config.n_layers:
            self._states.observe_head(self._see)
        else:
            self._states.observe(self._see)
        self._seen = layer

    def _see(self, name: str, x: F32) -> None:
        if name.endswith(".wo"):
            places, width = head_positions(self._config, self._states.layer)["wo"]
            wide = np.zeros((len(x), width), np.float32)
            wide[:, places] = x
            x = wide
        found = x.T @ x if self._gptq else squares(x)
        if name in self._moments:
            self._moments[name] += found
        else:
            self._moments[name] = found

    def _factor(self, source: str) -> F32:
        if source not in self._factors:
            self._factors[source] = inverse_factor(self._moments.pop(source))
        return self._factors[source]

    def _unpadded(self) -> dict[str, F32]:
        """Return the layer's stored matrices as in the checkpoint: not stacked, heads not padded."""
        matrices: dict[str, F32] = {}
        for product in list(self._stored):
            at, name = product.rsplit(".", 1)
            rows, start = np.concatenate(self._stored.pop(product)), 0
            heads = head_positions(self._config, self._states.layer)
            for part in STACKED.get(name, (name,)):
                if start == len(rows):  # no wk and wv, because K and V are borrowed
                    break
                if part == "wo":
                    matrices[f"{at}.wo"] = rows[:, heads["wo"][0]]
                    continue
                keep, size = heads.get(part, (slice(None), len(rows)))
                matrices[f"{at}.{part}"] = rows[start : start + size][keep]
                start += size
        return matrices


def head_positions(config: ModelConfig, number: int) -> dict[str, tuple[Positions, int]]:
    """Return matrix -> where padding puts its rows (of wo: columns), and how many there are then."""
    layer = config.layer(number)
    q, kv = config.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    numbers = {
        name: np.arange(1, size + 1, dtype=np.float32)
        for name, size in (("wq", q), ("wk", kv), ("wv", kv), ("wo", q))
    }
    probes = {n: ArrayMatrix(v[None] if n == "wo" else v[:, None]) for n, v in numbers.items()}
    padded = {n: whole(matrix).ravel() for n, matrix in pad_heads(config, number, probes).items()}
    return {name: (np.flatnonzero(values), len(values)) for name, values in padded.items()}
