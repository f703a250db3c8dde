"""Rules of stem_edge.onnx_operators: what an operator makes of inputs of known types and shapes.

T tokens of a step, slots of the row cache and the KV cache's capacity are sizes that only a step
knows; they are compared by name. Every rule raises ValueError if inputs do not fit each other, so
that no kernel is left to find out by reading beyond one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from stem_edge import graph_io as io
from stem_edge.config import ModelConfig
from stem_edge.graph_io import Shape, Value
from stem_edge.onnx_file import Node, Tensor
from stem_edge.rows import RecordLayout

F32, U8, I64 = "float32", "uint8", "int64"


class Step(NamedTuple):
    """A node with what is known of its inputs; None: one that is left out."""

    node: Node
    inputs: list[Value | None]
    model: ModelConfig
    layout: RecordLayout | None

    def value(self, index: int, type: str = F32) -> Value:
        """An input that must be there, of this type."""
        value = self.inputs[index]
        if value is None or value.type != type:
            raise ValueError(f"input {index} is {value or 'left out'}, expected {type}")
        return value

    def shape(self, index: int, type: str = F32) -> Shape:
        """Shape of an input of this type."""
        return self.value(index, type).shape or ()

    def line(self, index: int, type: str = F32) -> tuple[Shape, int]:
        """Shape of an input but for the last size, and that, which must be known."""
        shape = self.shape(index, type)
        if not shape or not isinstance(shape[-1], int):
            raise ValueError(
                f"input {index} is {self.inputs[index]}, whose last size must be known"
            )
        return shape[:-1], shape[-1]

    def expect(self, index: int, type: str, shape: Shape) -> None:
        """Raises ValueError unless an input has this type and shape."""
        found = self.inputs[index]
        if found is None or (found.type, found.shape) != (type, shape):
            raise ValueError(
                f"input {index} is {found or 'left out'}, expected {Value(type, shape)}"
            )

    def content(self, index: int) -> Shape:
        """The sizes that an input holds."""
        content = self.value(index, I64).content
        if content is None:
            raise ValueError(f"input {index} holds sizes that are not known")
        return content

    def attribute(self, name: str) -> Any:
        """An attribute, whose type and range are checked."""
        return self.node.attributes[name]


Rule = Callable[[Step], list[Value | None]]


def unchanged(step: Step) -> list[Value | None]:
    """A value for each."""
    return [Value(F32, step.shape(0))]


def widened(step: Step) -> list[Value | None]:
    """Of two values, the smaller fits into each line of the greater: it never grows both."""
    first, second = sorted((step.shape(0), step.shape(1)), key=_size_key)
    pairs = zip(reversed(first), reversed(second), strict=False)
    if len(first) > len(second) or any(a not in (1, b) for a, b in pairs):
        raise ValueError(f"{list(first)} does not fit into {list(second)}")
    return [Value(F32, second)]


def _size_key(shape: Shape) -> tuple[int, int, int]:
    names = sum(isinstance(size, str) for size in shape)
    return len(shape), names, prod(size for size in shape if isinstance(size, int))


def cast(step: Step) -> list[Value | None]:
    """float16 -> float32."""
    return [Value(F32, step.shape(0, "float16"))]


def concat(step: Step) -> list[Value | None]:
    """Parts of the logits beside each other."""
    lines = [step.line(index) for index in range(len(step.inputs))]
    width = sum(width for _, width in lines)
    if len({outer for outer, _ in lines}) > 1 or width > step.model.vocab_size:
        raise ValueError(f"{len(lines)} parts of {width} values do not fit beside each other")
    return [Value(F32, (*lines[0][0], width))]


def constant_of_shape(step: Step) -> list[Value | None]:
    """One value, as often as there are tokens."""
    filling: Tensor = step.attribute("value")
    if (filling.type, filling.dims) != (U8, (1,)) or step.content(0) != ("T",):
        raise ValueError(f"{list(step.content(0))} of {filling.type}; expected T bytes")
    return [Value(U8, ("T",))]


def gather(step: Step) -> list[Value | None]:
    """Lines of a matrix by their numbers."""
    data, ids = step.inputs[0], _numbers(step)
    if data is None or data.type not in (F32, "float16") or len(data.shape or ()) != 2:
        raise ValueError(f"input 0 is {data}, expected a matrix")
    return [Value(data.type, (*ids, *(data.shape or ())[1:]))]


def gather_blocks(step: Step) -> list[Value | None]:
    """The same of a quantized one."""
    bits, block = step.attribute("bits"), step.attribute("block_size")
    ids, (outer, nbytes) = _numbers(step), step.line(0, U8)
    width = nbytes * 8 // bits
    if len(outer) != 1 or width % block:
        raise ValueError(f"input 0 is {step.inputs[0]}, which has no whole blocks of {block}")
    groups = width // block
    step.expect(2, F32, (*outer, groups))
    step.expect(3, U8, (*outer, -(-groups * bits // 8)))
    return [Value(F32, (*ids, width))]


def _numbers(step: Step) -> Shape:
    """Shape of the numbers, all of which there are lines for."""
    lines = {io.TOKEN_IDS: step.model.vocab_size, io.SLOT_IDS: "slots"}
    found = (step.inputs[0] or Value(F32, ())).shape or (0,)
    if found[0] != lines.get(step.node.inputs[1]):
        raise ValueError(f"{found[0]} lines are taken by {step.node.inputs[1]}")
    return step.shape(1, I64)


def one_hot(step: Step) -> list[Value | None]:
    """A score for each slot."""
    step.expect(2, F32, (2,))
    if step.shape(0, I64) != ("T",) or step.content(1) != ("slots",):
        raise ValueError(f"{step.shape(0, I64)} of {step.content(1)}; expected tokens and slots")
    return [Value(F32, ("T", "slots"))]


def quantize_linear(step: Step) -> list[Value | None]:
    """Codes with a scale for each token."""
    shape = step.shape(0)
    if len(shape) != 3:
        raise ValueError(f"input 0 is {step.inputs[0]}, expected [1, T, width]")
    step.expect(1, F32, shape[1:2])
    step.expect(2, U8, shape[1:2])
    return [Value(U8, shape)]


def reduce_max(step: Step) -> list[Value | None]:
    """The greatest of each token."""
    shape = step.shape(0)
    if len(shape) != 3 or step.content(1) != (2,):
        raise ValueError(f"axes {step.content(1)} of {step.inputs[0]}; expected the last of three")
    return [Value(F32, (*shape[:2], 1))]


def reshape(step: Step) -> list[Value | None]:
    """The same values in another shape: 0 is the old size; or [-1], all in one line."""
    value = step.inputs[0]
    if value is None or value.type not in (F32, I64) or value.shape is None:
        raise ValueError(f"input 0 is {value}, expected numbers")
    wanted, old = step.content(1), value.shape
    if wanted == (-1,):
        sizes = _factors(old) or [1]
        if len(sizes) > 1:
            raise ValueError(f"{value} has no known size as one line")
        return [Value(value.type, tuple(sizes))]
    copied = wanted[: len(old)]
    new = [size or old[at] for at, size in enumerate(copied)] + list(wanted[len(old) :])
    if _factors(new) != _factors(old) or any(isinstance(n, int) and n < 1 for n in new):
        raise ValueError(f"{value} cannot be {list(wanted)}")
    return [Value(value.type, tuple(new))]


def _factors(shape: Sequence[int | str]) -> list[int | str]:
    """How many values a shape has: the product of the known sizes, and the names of the others."""
    known = prod(size for size in shape if isinstance(size, int))
    return [*([known] if known != 1 else []), *sorted(s for s in shape if isinstance(s, str))]


def shape(step: Step) -> list[Value | None]:
    """Its sizes, or the first of them."""
    value, names = step.inputs[0], step.node.attributes
    if value is None or value.shape is None or len(names) == 1:
        raise ValueError(f"sizes of {value}, with {sorted(names)}")
    sizes = value.shape[: names.get("end", len(value.shape))]
    return [Value(I64, (len(sizes),), sizes)]


def norm(step: Step) -> list[Value | None]:
    """RMS norm of each line."""
    _, width = step.line(0)
    step.expect(1, F32, (width,))
    _check_epsilon(step)
    return [Value(F32, step.shape(0))]


def skip_norm(step: Step) -> list[Value | None]:
    """RMS norm of a sum, and the sum."""
    _, width = step.line(0)
    step.expect(1, F32, step.shape(0))
    step.expect(2, F32, (width,))
    _check_epsilon(step)
    if step.node.outputs[1] or step.node.outputs[2]:
        raise ValueError("it has outputs 1 and 2, which only training has")
    value = Value(F32, step.shape(0))
    return [value, None, None, value]


def _check_epsilon(step: Step) -> None:
    if not 0 < step.attribute("epsilon") < 1:
        raise ValueError(f"epsilon is {step.attribute('epsilon')}, expected 0 to 1")


def split(step: Step) -> list[Value | None]:
    """q, k and v out of one line."""
    (outer, width), sizes = step.line(0), step.content(1)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) != 3 or len(sizes) != 3 or sum(known) != width:
        raise ValueError(f"{width} values cannot be split into {list(sizes)}")
    return [Value(F32, (*outer, size)) for size in known]


def fused_matmul(step: Step) -> list[Value | None]:
    """x [..., K] times a matrix [N, K]."""
    outer, width = step.line(0)
    (rows, *_), found = step.line(1)[0] or (0,), step.shape(1)
    if len(outer) != 2 or len(found) != 2 or found[1] != width:
        raise ValueError(f"{step.inputs[0]} cannot be multiplied with {step.inputs[1]}")
    return [Value(F32, (*outer, rows))]


def block_product(step: Step) -> list[Value | None]:
    """The same with codes in blocks."""
    rows, width, bits, block = map(step.attribute, ("N", "K", "bits", "block_size"))
    outer, found = step.line(0)
    if len(outer) != 2 or found != width or width % block:
        raise ValueError(f"input 0 is {step.inputs[0]}, expected {width} in blocks of {block}")
    blocks = width // block
    step.expect(1, U8, (rows, blocks, block * bits // 8))
    step.expect(2, F32, (rows * blocks,))
    if len(step.inputs) == 4:
        step.expect(3, U8, (rows * -(-blocks * bits // 8),))
    return [Value(F32, (*outer, rows))]


def integer_product(step: Step) -> list[Value | None]:
    """Codes of activations times codes of a matrix [K, N]."""
    outer, width = step.line(0, U8)
    _, columns = step.line(1, "int8")
    step.expect(1, "int8", (width, columns))
    step.expect(2, F32, ())
    step.expect(3, F32, (columns,))
    step.expect(4, U8, ())
    if len(outer) != 2:
        raise ValueError(f"input 0 is {step.inputs[0]}, expected [1, T, width]")
    return [Value(F32, (*outer, columns))]


def attention(step: Step) -> list[Value | None]:
    """Attention over the KV cache of the layer that its inputs name."""
    model, node = step.model, step.node
    number = node.inputs[3].removeprefix(io.KEYS)
    layer = int(number) if number in map(str, range(model.n_layers)) else -1
    names = [f"{io.KEYS}{layer}", f"{io.VALUES}{layer}"]
    fixed = [io.SEQLENS_K, io.TOTAL_LENGTH, io.ROPE_COS, io.ROPE_SIN]
    if node.inputs[3:] != names + fixed or node.outputs[1:] != [io.NEW + name for name in names]:
        raise ValueError(f"its inputs are {node.inputs[3:]}, outputs {node.outputs[1:]}")
    _check_attributes(step, model, layer)
    width = io.head_width(model)
    q, kv = model.n_heads * width, model.n_kv_heads * width
    if step.inputs[1] is None and step.inputs[2] is None:
        step.expect(0, F32, (1, "T", q + 2 * kv))
    else:
        for index, size in enumerate((q, kv, kv)):
            step.expect(index, F32, (1, "T", size))
    return [Value(F32, (1, "T", q)), step.inputs[3], step.inputs[4]]


def _check_attributes(step: Step, model: ModelConfig, layer: int) -> None:
    window = model.window(layer)
    expected = {
        "num_heads": model.n_heads,
        "kv_num_heads": model.n_kv_heads,
        "do_rotary": 1,
        "rotary_interleaved": int(model.rope_interleaved),
        "scale": float(np.float32(model.head_dim**-0.5)),
        **({"local_window_size": window} if window else {}),
    }
    if step.node.attributes != expected or not isfinite(step.attribute("scale")):
        raise ValueError(f"its attributes are {step.node.attributes}, expected {expected}")


def experts(step: Step) -> list[Value | None]:
    """An expert a token, out of its slot."""
    return _mixture(step, codes=(2, 4), scales=(), left_out=(3,))


def quantized_experts(step: Step) -> list[Value | None]:
    """The same of quantized ones."""
    layout, attributes = step.layout, step.node.attributes
    expected = (layout.bits, layout.group_size) if layout else None
    if (attributes["expert_weight_bits"], attributes["block_size"]) != expected:
        raise ValueError(f"bits or block size are not those of the tables, {expected}")
    return _mixture(step, codes=(2, 5), scales=(3, 6), left_out=(4,))


def _mixture(
    step: Step, codes: tuple[int, int], scales: tuple[int, ...], left_out: tuple[int, ...]
) -> list[Value | None]:
    names, model = step.node.inputs, step.model
    layers = [n for n in model.stem_layers if io.row_codes(n) == names[codes[0]]]
    for indices, name in ((codes, io.row_codes), (scales, io.row_scales)):
        found = [names[index] for index in indices]
        if not layers or found != [name(layers[0], part) for part in range(len(indices))]:
            raise ValueError(f"its inputs are {names}, expected rows of one layer")
    if any(step.inputs[index] is not None for index in left_out):
        raise ValueError(f"its inputs are {names}, expected none in places {left_out}")
    step.expect(0, F32, (1, "T", model.dim))
    step.expect(1, F32, ("T", "slots"))
    return [Value(F32, step.shape(0))]
