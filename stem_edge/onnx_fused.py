"""Rules of stem_edge.onnx_operators, as in stem_edge.onnx_rules: of onnxruntime's own operators.

Their kernels trust most of what they are given, so names count here as well: an input by which
others are found (a slot, a place in the KV cache) must be the one that the runtime fills.
"""

from __future__ import annotations

import numpy as np

from stem_edge import graph_io as io
from stem_edge.config import ModelConfig
from stem_edge.graph_io import Value
from stem_edge.onnx_rules import U8, Step, check_epsilon, numbers


def gather_blocks(step: Step) -> list[Value | None]:
    """Lines of a quantized matrix by their numbers."""
    bits, block = step.attribute("bits"), step.attribute("block_size")
    outer, nbytes = step.line(0, U8)
    width = nbytes * 8 // bits
    if len(outer) != 1 or width % block:
        raise ValueError(f"input 0 is {step.inputs[0]}, which has no whole blocks of {block}")
    groups = width // block
    step.expect(2, step.floats, (*outer, groups))
    step.expect(3, U8, (*outer, -(-groups * bits // 8)))
    return [Value(step.floats, (*numbers(step, outer[0]), width))]


def skip_norm(step: Step) -> list[Value | None]:
    """RMS norm of a sum, and the sum."""
    _, width = step.line(0)
    step.expect(1, step.floats, step.shape(0))
    step.expect(2, step.floats, (width,))
    check_epsilon(step)
    if step.node.outputs[1] or step.node.outputs[2]:
        raise ValueError("it has outputs 1 and 2, which only training has")
    value = Value(step.floats, step.shape(0))
    return [value, None, None, value]


def fused_matmul(step: Step) -> list[Value | None]:
    """x [..., K] times a matrix [N, K]."""
    (outer, width), matrix = step.line(0), step.shape(1)
    if len(outer) != 2 or matrix[1:] != (width,) or not isinstance(matrix[0], int):
        raise ValueError(f"{step.inputs[0]} cannot be multiplied with {step.inputs[1]}")
    return [Value(step.floats, (*outer, matrix[0]))]


def block_product(step: Step) -> list[Value | None]:
    """The same of a matrix of codes in blocks."""
    rows, width, bits, block = map(step.attribute, ("N", "K", "bits", "block_size"))
    outer, found = step.line(0)
    if len(outer) != 2 or found != width or width % block:
        raise ValueError(f"input 0 is {step.inputs[0]}, expected {width} in blocks of {block}")
    blocks = width // block
    step.expect(1, U8, (rows, blocks, block * bits // 8))
    step.expect(2, step.floats, (rows * blocks,))
    if len(step.inputs) == 4:
        step.expect(3, U8, (rows * -(-blocks * bits // 8),))
    return [Value(step.floats, (*outer, rows))]


def integer_product(step: Step) -> list[Value | None]:
    """Codes of activations times codes of a matrix [K, N]."""
    outer, width = step.line(0, U8)
    _, columns = step.line(1, "int8")
    step.expect(1, "int8", (width, columns))
    step.expect(2, step.floats, ())
    step.expect(3, step.floats, (columns,))
    step.expect(4, U8, ())
    if len(outer) != 2:
        raise ValueError(f"input 0 is {step.inputs[0]}, expected [1, T, width]")
    return [Value(step.floats, (*outer, columns))]


def attention(step: Step) -> list[Value | None]:
    """Attention over the KV cache of the layer that its inputs name."""
    model, node = step.model, step.node
    layers = {f"{io.KEYS}{number}": number for number in range(model.n_layers)}
    layer = layers.get(node.inputs[3], -1)
    names = [f"{io.KEYS}{layer}", f"{io.VALUES}{layer}"]
    fixed = [io.SEQLENS_K, io.TOTAL_LENGTH, io.ROPE_COS, io.ROPE_SIN]
    made = [io.NEW + name for name in names]
    if layer < 0 or node.inputs[3:] != names + fixed or node.outputs[1:] != made:
        raise ValueError(f"its inputs are {node.inputs[3:]}, outputs {node.outputs[1:]}")
    _check_attributes(step, model, layer)
    width = io.head_width(model)
    q, kv = model.n_heads * width, model.n_kv_heads * width
    if step.inputs[1] is None and step.inputs[2] is None:
        step.expect(0, step.floats, (1, "T", q + 2 * kv))
    else:
        for index, size in enumerate((q, kv, kv)):
            step.expect(index, step.floats, (1, "T", size))
    return [Value(step.floats, (1, "T", q)), step.inputs[3], step.inputs[4]]


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
    if step.node.attributes != expected:
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
    step.expect(0, step.floats, (1, "T", model.dim))
    step.expect(1, step.floats, ("T", "slots"))
    return [Value(step.floats, step.shape(0))]
