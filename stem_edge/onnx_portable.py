"""Operators that portable graphs may have, all of ONNX itself, and the shapes that they make.

As stem_edge.onnx_operators, for graphs that stem_edge.export.portable writes. Of a step they know T
tokens, P places of the KV cache before them, and n logits that are wanted. No rule makes more of a
value than the model's own widths allow, however often a graph repeats it.
"""

from __future__ import annotations

from math import prod

from stem_edge import graph_io as io
from stem_edge import onnx_rules as rules
from stem_edge.config import ModelConfig
from stem_edge.graph_io import Shape, Value
from stem_edge.onnx_file import Tensor
from stem_edge.onnx_operators import BLOCKS, Operator
from stem_edge.onnx_rules import F32, U8, Step
from stem_edge.portable_io import SEEN
from stem_edge.quantize import MIN_BLOCK

U4 = "uint4"
FLOAT_TYPE, U4_TYPE = 1, 21  # of ONNX
OPSETS = {"": 21}
PERMS = ((1, 0), (0, 2, 1, 3), (1, 0, 2, 3), (1, 0, 3, 2))
MAX_PARTS = 1 << 12  # of a head


def cast(step: Step) -> list[Value | None]:
    """Bytes -> floats, or values of 4 bits."""
    kind = {FLOAT_TYPE: F32, U4_TYPE: U4}[step.attribute("to")]
    return [Value(kind, step.shape(0, U8))]


def concat(step: Step) -> list[Value | None]:
    """Parts of the logits beside each other, two halves, or new keys or values after those before."""
    first, second = step.shape(0), step.shape(1)
    if step.attribute("axis") == 2:
        return [_longer(step)]
    if len(first) != 4:
        return rules.concat(step)
    (outer, width), joined = step.line(0), (*first[:-1], 2 * int(first[-1]))
    most = max(step.model.dim, step.model.n_heads * io.head_width(step.model))
    values = prod(size for size in outer if isinstance(size, int)) * 2 * width
    if first != second or len(step.inputs) != 2 or values > most:
        raise ValueError(
            f"{len(step.inputs)} parts, {list(first)} and {list(second)}, cannot be halves of a line"
        )
    return [Value(F32, joined)]


def _longer(step: Step) -> Value:
    before, new = _cache(step.model, "P"), _cache(step.model, "T")
    step.expect(0, F32, before)
    step.expect(1, F32, new)
    if len(step.inputs) != 2:
        raise ValueError(
            f"{len(step.inputs)} parts; expected what was there before, and the step's"
        )
    return Value(F32, _cache(step.model, SEEN))


def _cache(model: ModelConfig, places: str) -> Shape:
    return (1, model.n_kv_heads, places, io.head_width(model))


def constant_of_shape(step: Step) -> list[Value | None]:
    """Zero points of a matrix, all alike."""
    filling: Tensor = step.attribute("value")
    sizes, model = step.content(0), step.model
    mixed = model.n_heads * io.head_width(model)
    lines = max(model.vocab_size, 3 * mixed, model.d_ff, model.dim)
    most = (lines, max(model.dim, mixed, model.d_ff, model.row_rank) // MIN_BLOCK)
    fits = len(sizes) == 2 and all(
        isinstance(size, int) and 1 <= size <= limit
        for size, limit in zip(sizes, most, strict=True)
    )
    if (filling.type, filling.dims) != (U8, (1,)) or not fits:
        raise ValueError(
            f"{list(sizes)} of {filling.type}; expected bytes for the blocks of a matrix, at most {most}"
        )
    return [Value(U8, sizes)]


def dequantize(step: Step) -> list[Value | None]:
    """A matrix [N, K] of codes in blocks as floats."""
    codes, block = step.value(0, U8, U4), step.attribute("block_size")
    _, width = step.line(0, codes.type)
    lines = codes.shape or ()
    if len(lines) != 2 or width % block:
        raise ValueError(f"input 0 is {codes}, expected a matrix in blocks of {block}")
    groups = (lines[0], width // block)
    step.expect(1, F32, groups)
    step.expect(2, codes.type, groups)
    return [Value(F32, lines)]


def gather(step: Step) -> list[Value | None]:
    """Lines of a matrix by the ids of tokens, or those of a step whose logits are wanted."""
    if "axis" in step.node.attributes:
        step.expect(0, F32, (1, "T", step.model.dim))
        step.expect(1, rules.I64, ("n",))
        if step.node.inputs != [io.HIDDEN, io.WANTED]:
            raise ValueError(f"its inputs are {step.node.inputs}")
        return [Value(F32, (1, "n", step.model.dim))]
    data = step.value(0, F32, U8)
    shape = data.shape or ()
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise ValueError(f"input 0 is {data}, expected a matrix")
    return [Value(data.type, (*rules.numbers(step, shape[0]), shape[1]))]


def matmul(step: Step) -> list[Value | None]:
    """x [1, T, K] times a matrix [K, N]; or queries times keys, and their weights times values."""
    first, second = step.shape(0), step.shape(1)
    if len(first) == 4:
        return [_by_heads(step, first, second)]
    outer, width = step.line(0)
    if len(first) != 3 or len(second) != 2 or second[0] != width or not isinstance(second[1], int):
        raise ValueError(f"{step.inputs[0]} cannot be multiplied with {step.inputs[1]}")
    return [Value(F32, (*outer, second[1]))]


def _by_heads(step: Step, first: Shape, second: Shape) -> Value:
    model, width = step.model, io.head_width(step.model)
    heads = (model.n_kv_heads, model.n_heads // model.n_kv_heads, "T")
    for inner, result in ((width, SEEN), (SEEN, width)):
        if (first, second) == ((*heads, inner), (model.n_kv_heads, 1, inner, result)):
            return Value(F32, (*heads, result))
    raise ValueError(f"{step.inputs[0]} and {step.inputs[1]} are no heads of the model")


def reduce_mean(step: Step) -> list[Value | None]:
    """The mean of each line."""
    outer, _ = step.line(0)
    if step.content(1) != (-1,):
        raise ValueError(f"axes {list(step.content(1))}; expected the last")
    return [Value(F32, (*outer, 1))]


def cut(step: Step) -> list[Value | None]:
    """A part of each line, or every second value of it."""
    (outer, width), bounds = step.line(0), []
    for index in range(1, 5):
        content = step.content(index)
        if len(content) != 1 or not isinstance(content[0], int):
            raise ValueError(f"input {index} holds {list(content)}, expected one number")
        bounds.append(content[0])
    start, stop, axis, stride = bounds
    if not 0 <= start < stop <= width or axis != -1 or stride not in (1, 2):
        raise ValueError(
            f"{start} to {stop} by {stride} of axis {axis} are no part of {width} values"
        )
    return [Value(F32, (*outer, -(-(stop - start) // stride)))]


def softmax(step: Step) -> list[Value | None]:
    """Weights of the places that are seen."""
    if step.shape(0)[-1:] != (SEEN,):
        raise ValueError(f"input 0 is {step.inputs[0]}, expected scores of {SEEN} places")
    return [Value(F32, step.shape(0))]


def transpose(step: Step) -> list[Value | None]:
    """The same values with dimensions in another order."""
    shape, perm = step.shape(0), step.attribute("perm")
    if len(shape) != len(perm):
        raise ValueError(f"input 0 is {step.inputs[0]}, its order is {list(perm)}")
    return [Value(F32, tuple(shape[at] for at in perm))]


def unsqueeze(step: Step) -> list[Value | None]:
    """Lines [T, width] for all heads: [T, 1, width]."""
    shape = step.shape(0)
    if len(shape) != 2 or step.content(1) != (1,):
        raise ValueError(f"axes {list(step.content(1))} of {step.inputs[0]}; expected 1 of two")
    return [Value(F32, (shape[0], 1, shape[1]))]


OPERATORS: dict[tuple[str, str], Operator] = {
    ("", "Add"): Operator(rules.widened, (2,)),
    ("", "Cast"): Operator(cast, (1,), {"to": (FLOAT_TYPE, U4_TYPE)}),
    ("", "Concat"): Operator(concat, tuple(range(2, MAX_PARTS)), {"axis": (-1, 2)}),
    ("", "ConstantOfShape"): Operator(constant_of_shape, (1,), {"value": tuple}),
    ("", "DequantizeLinear"): Operator(dequantize, (3,), {"axis": (1,), "block_size": BLOCKS}),
    ("", "Div"): Operator(rules.widened, (2,)),
    ("", "Floor"): Operator(rules.unchanged, (1,)),
    ("", "Gather"): Operator(gather, (2,), {}, {"axis": (1,)}),
    ("", "MatMul"): Operator(matmul, (2,)),
    ("", "Mul"): Operator(rules.widened, (2,)),
    ("", "ReduceMean"): Operator(reduce_mean, (2,), {"keepdims": (1,)}),
    ("", "Reshape"): Operator(rules.reshape, (2,)),
    ("", "Sigmoid"): Operator(rules.unchanged, (1,)),
    ("", "Slice"): Operator(cut, (5,)),
    ("", "Softmax"): Operator(softmax, (1,), {"axis": (-1,)}),
    ("", "Split"): Operator(rules.split, (2,), {"axis": (-1,)}, outputs=3),
    ("", "Sqrt"): Operator(rules.unchanged, (1,)),
    ("", "Sub"): Operator(rules.widened, (2,)),
    ("", "Tanh"): Operator(rules.unchanged, (1,)),
    ("", "Transpose"): Operator(transpose, (1,), {"perm": PERMS}),
    ("", "Unsqueeze"): Operator(unsqueeze, (2,)),
}
