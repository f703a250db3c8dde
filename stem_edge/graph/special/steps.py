"""Matrix products for models with static activation ranges: values are whole multiples of a step.

MatMulNBits quantizes its input to int8 with a scale per block. This changes nothing if a block contains
the value 127 and only whole numbers from -127 to 127. So inputs are passed as whole numbers of steps, and
127 is appended to every (block - 1) of them. The weights have a zero column there, and their scales include
the step. Results are exact, except that an input of -128 steps becomes -127.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat, MatrixKind
from stem_edge.graph.ir import Graph
from stem_edge.graph.layer import layer_shapes
from stem_edge.graph.linear import Products
from stem_edge.graph.weight_plan import Blocks, WeightPlan
from stem_edge.numerics.quantize import I64

TOP = 127
SMALL_BLOCKS = 16, 32
ZERO = "int8.zero"


class SteppedProducts(Products):
    def __init__(
        self, graph: Graph, plan: WeightPlan, format: BackboneFormat, config: ModelConfig
    ) -> None:
        super().__init__(graph, plan, format)
        self._config, self._ranges = config, config.ranges
        # (x, step, layout) -> name of x in steps, as it is or in blocks
        self._made: dict[tuple[object, ...], str] = {}
        graph.constant(ZERO, np.array(0, np.int8))

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit x times stacked `parts` [N, K]; round x and the result to steps set by training."""
        ranges = [self._ranges.get("head" if kind == "head" else part) for part in parts]
        if not any(ranges):
            return super().product(name, kind, x, parts, shape)
        if kind == "qkv" and len(parts) > 1:  # each has its own steps
            shapes = layer_shapes(self._config, int(name.split(".")[1]))
            made = [
                self.product(part, kind, x, (part,), (shapes[part.split(".")[2]][0], shape[1]))
                for part in parts
            ]
            return self.graph.add("Concat", made, name, axis=-1)
        taken, given = ranges[0] or (0.0, 0.0)
        # The head's last node must be called `name`, so its exact product gets another name.
        exact = f"{name}.exact" if kind == "head" and given else name
        if not taken:
            exact = super().product(exact, kind, x, parts, shape)
        elif self.format.bits(kind, exact) == 32:
            exact = super().product(exact, kind, self._rounded(x, taken), parts, shape)
        else:
            bits, block = self.format.bits(kind, exact), self.format.block_size
            whole = Blocks(exact, kind, parts, bits, block, step=taken)
            exact = self._in_parts(x, whole, shape)
        if not given:
            return exact
        return self._rounded(exact, given, name if kind == "head" else f"{name}.rounded")

    def _in_parts(self, x: str, whole: Blocks, shape: tuple[int, int]) -> str:
        """Emit x times a matrix of `shape` [N, K], as a sum if `apart` divides its columns."""
        made = list[str]()
        for item in apart(whole, shape[1]):
            laid = self._capped(x, item, shape[1])
            size = shape[0], capped_width(item.columns[1] - item.columns[0], item.block)
            made.append(self.in_blocks(item, laid, size))
        return made[0] if len(made) == 1 else self.graph.add("Add", made, whole.name)

    def rows(self, ids: str, result: str, shape: tuple[int, int]) -> str:
        """Emit rows `ids` of the embedding as `result`, without the extra zero columns of a tied head."""
        step, _ = self._ranges.get("head", (0.0, 0.0))
        if not (self.format.tied and step) or self.format.bits("embedding") == 32:
            return super().rows(ids, result, shape)
        found = list[str]()
        for item in self.plan.of("embedding", Blocks):
            size, own = item.columns[1] - item.columns[0], f"embedding.{item.columns[0]}"
            x = self.gathered(item, own, ids, f"{own}.capped")
            order = self.graph.constant(f"uncapped.{size}.{item.block}", places(size, item.block))
            found.append(self.graph.add("Gather", [x, order], f"{own}.stepped", axis=-1))
        x = self.graph.add("Concat", found, "embedding.stepped", axis=-1)
        return self.graph.add("Div", [x, self.graph.float(step)], result)

    def _rounded(self, x: str, step: float, result: str = "") -> str:
        """Emit n * step, with n = x / step rounded and clipped to -128..127. result: its name."""
        key = x, step, "rounded"
        if key not in self._made:
            result = result or f"{x}.on_{step!r}"
            codes = self._codes(x, step, result)
            # Not DequantizeLinear, which onnxruntime moves through other nodes, with a wrong type.
            whole = self.graph.add("Cast", [codes], f"{result}.whole", to=1)
            self._made[key] = self.graph.add("Mul", [whole, self.graph.float(step)], result)
        return self._made[key]

    def _capped(self, x: str, item: Blocks, x_width: int) -> str:
        """Emit columns item.columns of x [B, T, x_width] in blocks, as the product with `item` takes them.

        Values become whole numbers of `item.step`, and 127 is appended to each block (see the module's docstring).
        """
        step, columns, block, graph = item.step, item.columns, item.block, self.graph
        key, width = (x, step, block, columns), columns[1] - columns[0]
        if key not in self._made:
            result = f"{x}.by_{step!r}.from_{columns[0]}"
            codes = self._clipped(x, step)
            if width < x_width:
                codes = graph.cut(codes, *columns, 1, f"{result}.cut")
            # Not by Gather, which takes three times as long, because it copies value by value.
            blocks = -(-width // (block - 1))
            if more := blocks * (block - 1) - width:
                # With zeros, because kernels add the middle code times all inputs and subtract it again:
                # a block filled up with 127 would lose its last digits.
                codes = self._longer(codes, more, 0, f"{result}.whole")
            apart = graph.reshape(codes, [0, 0, blocks, block - 1], f"{result}.apart")
            ended = self._longer(apart, 1, TOP, f"{result}.ended")
            laid = graph.reshape(ended, [0, 0, blocks * block], f"{result}.laid")
            self._made[key] = graph.add("Cast", [laid], result, to=1)
        return self._made[key]

    def _longer(self, codes: str, more: int, value: int, result: str) -> str:
        """Append `more` copies of `value` to `codes`, along the last axis."""
        constant = self.graph.constant(f"int8.{value}", np.array(value, np.int8))
        pads, axis = self.graph.sizes([0, more]), self.graph.sizes([-1])
        return self.graph.add("Pad", [codes, pads, constant, axis], result)

    def _clipped(self, x: str, step: float) -> str:
        """Emit round(x / step) as int8, clipped to -127 to 127."""
        key, graph, result = (x, step), self.graph, f"{x}.by_{step!r}"
        if key not in self._made:
            least = graph.constant(f"int8.{-TOP}", np.array(-TOP, np.int8))
            codes = self._codes(x, step, result)
            self._made[key] = graph.add("Clip", [codes, least], f"{result}.clipped")
        return self._made[key]

    def _codes(self, x: str, step: float, result: str) -> str:
        scale = self.graph.float(step)
        return self.graph.add("QuantizeLinear", [x, scale, ZERO], f"{result}.codes")


def apart(whole: Blocks, width: int) -> list[Blocks]:
    """Divide a 2-bit matrix of `width` columns: columns after the last full block get 4 bits.

    2-bit kernels read four blocks at a time and would pad 1536 columns to 2048. Other matrices stay
    whole: 4-bit ones grow to 1664 columns only, and a second product slows prompts by an eighth.
    """
    end = width // (whole.block - 1) * (whole.block - 1)
    for block in SMALL_BLOCKS if whole.bits == 2 else ():
        if 0 < width - end < block < whole.block <= end:
            name, columns = f"{whole.name}.rest", (end, width)
            rest = replace(whole, name=name, block=block, bits=4, columns=columns)
            return [replace(whole, name=f"{whole.name}.most", columns=(0, end)), rest]
    return [replace(whole, columns=(0, width))]


def capped_width(width: int, block: int) -> int:
    """Return the width of a matrix after a zero column is added at the end of each block."""
    return -(-width // (block - 1)) * block


def places(width: int, block: int) -> I64:
    """Return each column's index [width] after a zero column is added at the end of each block."""
    columns = np.arange(width, dtype=np.int64)
    return columns // (block - 1) * block + columns % (block - 1)
