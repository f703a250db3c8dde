"""Products of matrices that were trained with static ranges: inputs and results are multiples of a step.

MatMulNBits rounds its input once more, to 127 steps up to the greatest value of each block. Where a
block holds a value of exactly 127, and all others are whole numbers from -127 to 127, that changes
nothing. So inputs are given as such numbers, with 127 behind each block - 1 of them; the weights have a
code of zero there, and the step is a part of their scales. Only -128 becomes -127.
"""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat, MatrixKind
from stem_edge.graph.ir import Graph
from stem_edge.graph.layer import backbone_shapes
from stem_edge.graph.linear import DecodeProducts
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.quantize import I64

TOP = 127
ZERO = "int8.zero"


class SteppedProducts(DecodeProducts):
    """Products that decode a model with ranges."""

    def __init__(
        self, graph: Graph, plan: WeightPlan, format: BackboneFormat, config: ModelConfig
    ) -> None:
        super().__init__(graph, plan, format)
        self._ranges, self._shapes = config.ranges, backbone_shapes(config)
        self._made: dict[tuple[str, float, int], str] = {}  # x, a step, a block or 0 -> x in steps
        graph.constant(ZERO, np.array(0, np.int8))

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit a product of x in steps, and its result in steps."""
        ranges = [self._ranges.get("head" if kind == "head" else part) for part in parts]
        if not any(ranges):
            return super().product(name, kind, x, parts, shape)
        if kind == "qkv" and len(parts) > 1:  # each has its own steps
            sizes = [(self._shapes[part][0], shape[1]) for part in parts]
            made = [
                self.product(part, kind, x, (part,), size)
                for part, size in zip(parts, sizes, strict=True)
            ]
            return self.graph.add("Concat", made, name, axis=-1)
        taken, given = ranges[0] or (0.0, 0.0)
        # The weights of a head have its kind's type under any name, and its result must keep this one.
        exact = f"{name}.exact" if kind == "head" and given else name
        if not taken:
            exact = super().product(exact, kind, x, parts, shape)
        elif self.format.bits(kind, exact) == 32:
            exact = super().product(exact, kind, self._rounded(x, taken), parts, shape)
        else:
            block, (rows, width) = self.format.block_size, shape
            x, shape = self._capped(x, taken, width), (rows, capped_width(width, block))
            exact = self.in_blocks(exact, kind, x, parts, shape, block, taken)
        if not given:
            return exact
        return self._rounded(exact, given, name if kind == "head" else f"{name}.rounded")

    def rows(
        self, name: str, kind: MatrixKind, ids: str, result: str, shape: tuple[int, int]
    ) -> str:
        """Emit rows; those that a head shares have a code of zero at the end of each block."""
        step, _ = self._ranges.get("head", (0.0, 0.0))
        if not (self.format.tied and step) or self.format.bits(kind) == 32:
            return super().rows(name, kind, ids, result, shape)
        (count, width), block, graph = shape, self.format.block_size, self.graph
        wide = capped_width(width, block)
        x = self.gathered(name, kind, ids, f"{result}.capped", (count, wide), block)
        order = graph.constant(f"uncapped.{width}.{block}", places(width, block))
        x = graph.add("Gather", [x, order], f"{result}.stepped", axis=-1)
        return graph.add("Div", [x, graph.float(step)], result)

    def _rounded(self, x: str, step: float, result: str = "") -> str:
        """Emit x rounded to multiples of a step from -128 to 127."""
        key = x, step, 0
        if key not in self._made:
            result = result or f"{x}.on_{step!r}"
            codes = self._codes(x, step, result)
            # Not DequantizeLinear, which onnxruntime moves through other nodes and loses the type of.
            whole = self.graph.add("Cast", [codes], f"{result}.whole", to=1)
            self._made[key] = self.graph.add("Mul", [whole, self.graph.float(step)], result)
        return self._made[key]

    def _capped(self, x: str, step: float, width: int) -> str:
        """Emit x [B, T, width] in whole steps, with 127 at the end of each block."""
        key, graph = (x, step, block := self.format.block_size), self.graph
        if key not in self._made:
            result = f"{x}.by_{step!r}"
            least, top = (graph.constant(f"int8.{n}", np.array(n, np.int8)) for n in (-TOP, TOP))
            codes = graph.add("Clip", [self._codes(x, step, result), least], f"{result}.clipped")
            blocks, last = -(-width // (block - 1)), graph.sizes([-1])
            pads = [graph.sizes([0, blocks * (block - 1) - width]), top, last]
            whole = graph.add("Pad", [codes, *pads], f"{result}.whole")
            apart = graph.reshape(whole, [0, 0, blocks, block - 1], f"{result}.apart")
            ended = graph.add("Pad", [apart, graph.sizes([0, 1]), top, last], f"{result}.ended")
            laid = graph.reshape(ended, [0, 0, blocks * block], f"{result}.laid")
            self._made[key] = graph.add("Cast", [laid], result, to=1)
        return self._made[key]

    def _codes(self, x: str, step: float, result: str) -> str:
        scale = self.graph.float(step)
        return self.graph.add("QuantizeLinear", [x, scale, ZERO], f"{result}.codes")


def capped_width(width: int, block: int) -> int:
    """Return the columns of a matrix [N, width] with a code of zero at the end of each block."""
    return -(-width // (block - 1)) * block


def places(width: int, block: int) -> I64:
    """Return the column of a capped matrix for each column of the matrix."""
    columns = np.arange(width, dtype=np.int64)
    return columns // (block - 1) * block + columns % (block - 1)
