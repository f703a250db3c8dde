"""Rules of stem_edge.onnx_operators: what an operator makes of inputs of known types and shapes.

Those of ONNX's own operators; onnxruntime's are in stem_edge.onnx_fused. T tokens of a step, slots of the row cache and the KV cache's capacity are sizes that only a step
knows; they are compared by name. Every rule raises ValueError if inputs do not fit each other, so
that no kernel is left to find out by reading beyond one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from stem_edge import graph_io as io
from stem_edge.config import ModelConfig
from stem_edge.graph_io import Shape, Value
from stem_edge.onnx_file import Node, Tensor
from stem_edge.rows import RecordLayout

F32, U8, I64, I32 = "float32", "uint8", "int64", "int32"
CAST_TO = {1: F32, 10: "float16"}  # ONNX's numbers of types


class Step(NamedTuple):
    """A node with what is known of its inputs; None: one that is left out."""

    node: Node
    inputs: list[Value | None]
    model: ModelConfig
    layout: RecordLayout | None
    floats: str = F32  # type of activations, and of what they meet: float32 or float16

    def value(self, index: int, *types: str) -> Value:
        """An input that must be there, of one of these types."""
        value = self.inputs[index]
        if value is None or value.type not in types:
            expected = " or ".join(types)
            raise ValueError(f"input {index} is {value or 'left out'}, expected {expected}")
        return value

    def shape(self, index: int, type: str | None = None) -> Shape:
        """Shape of an input of this type. Default: that of activations."""
        return self.value(index, type or self.floats).shape or ()

    def line(self, index: int, type: str | None = None) -> tuple[Shape, int]:
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
        value = self.value(index, I64)
        if value.content is None or value.shape != (len(value.content),):
            raise ValueError(f"input {index} is {value}, expected a list of known sizes")
        return value.content

    def attribute(self, name: str) -> Any:
        """An attribute, whose type and range are checked."""
        return self.node.attributes[name]


Rule = Callable[[Step], list[Value | None]]


def unchanged(step: Step) -> list[Value | None]:
    """A value for each."""
    return [Value(step.floats, step.shape(0))]


def widened(step: Step) -> list[Value | None]:
    """Of two values, the smaller fits into each line of the greater: it never grows both."""
    first, second = sorted((step.shape(0), step.shape(1)), key=_size_key)
    pairs = zip(reversed(first), reversed(second), strict=False)
    if len(first) > len(second) or any(a not in (1, b) for a, b in pairs):
        raise ValueError(f"{list(first)} does not fit into {list(second)}")
    return [Value(step.floats, second)]


def _size_key(shape: Shape) -> tuple[int, int, int]:
    names = sum(isinstance(size, str) for size in shape)
    return len(shape), names, prod(size for size in shape if isinstance(size, int))


def cast(step: Step) -> list[Value | None]:
    """float16 -> float32, or back."""
    made = CAST_TO[step.attribute("to")]
    given = "float16" if made == F32 else F32
    return [Value(made, step.shape(0, given))]


def concat(step: Step) -> list[Value | None]:
    """Parts of the logits beside each other; or scales [N, groups, 1] twice."""
    if step.node.attributes.get("axis") == 2:
        return _twice(step)
    lines = [step.line(index) for index in range(len(step.inputs))]
    width = sum(width for _, width in lines)
    if len({outer for outer, _ in lines}) > 1 or width > step.model.vocab_size:
        raise ValueError(f"{len(lines)} parts of {width} values do not fit beside each other")
    return [Value(step.floats, (*lines[0][0], width))]


def _twice(step: Step) -> list[Value | None]:
    shape = step.shape(0)
    names = step.node.inputs
    if (
        [*names[1:], *step.inputs[1:]] != [names[0], step.inputs[0]]
        or len(shape) != 3
        or shape[2] != 1
    ):
        raise ValueError(
            f"{step.node.inputs} of {step.inputs[0]}; expected one [N, groups, 1] twice"
        )
    return [Value(step.floats, (*shape[:2], 2))]


def unsqueeze(step: Step) -> list[Value | None]:
    """Scales [N, groups] -> [N, groups, 1]."""
    shape = step.shape(0)
    if len(shape) != 2 or step.content(1) != (2,):
        raise ValueError(f"axes {step.content(1)} of {step.inputs[0]}; expected 2 of a matrix")
    return [Value(step.floats, (*shape, 1))]


def transpose(step: Step) -> list[Value | None]:
    """A matrix of floats, turned: [N, K] -> [K, N]."""
    shape = step.shape(0, F32)
    if len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        raise ValueError(f"input 0 is {step.inputs[0]}, expected a matrix of known sizes")
    return [Value(F32, shape[::-1])]


def product(step: Step) -> list[Value | None]:
    """x [..., K] times a matrix [K, N], in float32 whatever activations are."""
    (outer, width), matrix = step.line(0, F32), step.shape(1, F32)
    if len(outer) != 2 or len(matrix) != 2 or matrix[0] != width or isinstance(matrix[1], str):
        raise ValueError(f"{step.inputs[0]} cannot be multiplied with {step.inputs[1]}")
    return [Value(F32, (*outer, matrix[1]))]


def constant_of_shape(step: Step) -> list[Value | None]:
    """One value, as often as there are tokens."""
    filling: Tensor = step.attribute("value")
    if (filling.type, filling.dims) != (U8, (1,)) or step.content(0) != ("T",):
        raise ValueError(f"{list(step.content(0))} of {filling.type}; expected T bytes")
    return [Value(U8, ("T",))]


def constant_points(step: Step) -> list[Value | None]:
    """Zero points of the embedding, all alike, [V, bytes]."""
    filling: Tensor = step.attribute("value")
    size, tokens = step.content(0), step.model.vocab_size
    known = len(size) == 2 and size[0] == tokens and size[1] in range(1, step.model.dim)
    if (filling.type, filling.dims) != (U8, (1,)) or not known:
        raise ValueError(f"{list(size)} of {filling.type}; expected bytes for {tokens} tokens")
    return [Value(U8, size)]


def gather(step: Step) -> list[Value | None]:
    """Lines of a matrix by their numbers; or places of a step, those whose logits are wanted."""
    if "axis" in step.node.attributes:
        step.expect(0, step.floats, (1, "T", step.model.dim))
        step.expect(1, I64, ("n",))
        if step.node.inputs != [io.HIDDEN, io.WANTED]:
            raise ValueError(f"its inputs are {step.node.inputs}, expected hidden and wanted")
        return [Value(step.floats, (1, "n", step.model.dim))]
    data = step.value(0, F32, "float16")
    shape = data.shape or ()
    if len(shape) != 2:
        raise ValueError(f"input 0 is {data}, expected a matrix")
    return [Value(data.type, (*numbers(step, shape[0]), shape[1]))]


def numbers(step: Step, lines: int | str) -> Shape:
    """Shape of input 1, the numbers of lines; there are so many, one for every number."""
    expected = {io.TOKEN_IDS: step.model.vocab_size, io.SLOT_IDS: "slots"}
    if lines != expected.get(step.node.inputs[1]):
        raise ValueError(f"{lines} lines are taken by {step.node.inputs[1]}")
    return step.shape(1, I64)


def one_hot(step: Step) -> list[Value | None]:
    """A score for each slot."""
    step.expect(2, step.floats, (2,))
    if step.shape(0, I64) != ("T",) or step.content(1) != ("slots",):
        raise ValueError(f"{step.shape(0, I64)} of {step.content(1)}; expected tokens and slots")
    return [Value(step.floats, ("T", "slots"))]


def quantize_linear(step: Step) -> list[Value | None]:
    """Codes with a scale for each token."""
    shape = step.shape(0)
    if len(shape) != 3:
        raise ValueError(f"input 0 is {step.inputs[0]}, expected [1, T, width]")
    step.expect(1, step.floats, shape[1:2])
    step.expect(2, U8, shape[1:2])
    return [Value(U8, shape)]


def reduce_max(step: Step) -> list[Value | None]:
    """The greatest of each token."""
    shape = step.shape(0)
    if len(shape) != 3 or step.content(1) != (2,):
        raise ValueError(f"axes {step.content(1)} of {step.inputs[0]}; expected the last of three")
    return [Value(step.floats, (*shape[:2], 1))]


def reshape(step: Step) -> list[Value | None]:
    """The same values in another shape: 0 is the old size; or [-1], all in one line."""
    value = step.value(0, step.floats, I64)
    wanted, old = step.content(1), value.shape or ()
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
    step.expect(1, step.floats, (width,))
    check_epsilon(step)
    return [Value(step.floats, step.shape(0))]


def check_epsilon(step: Step) -> None:
    """Raises ValueError if what a norm adds before it divides can be no such number."""
    if not 0 < step.attribute("epsilon") < 1:
        raise ValueError(f"epsilon is {step.attribute('epsilon')}, expected 0 to 1")


def split(step: Step) -> list[Value | None]:
    """q, k and v out of one line."""
    (outer, width), sizes = step.line(0), step.content(1)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) != 3 or len(sizes) != 3 or sum(known) != width:
        raise ValueError(f"{width} values cannot be split into {list(sizes)}")
    return [Value(step.floats, (*outer, size)) for size in known]


def split_words(step: Step) -> list[Value | None]:
    """Words [n, words] of records, cut into those of each slab."""
    (outer, width), sizes = step.line(0, I32), step.content(1)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(sizes) != len(step.node.outputs) or len(known) != len(sizes) or sum(known) != width:
        raise ValueError(f"{width} words cannot be split into {list(sizes)}")
    return [Value(I32, (*outer, size)) for size in sizes]


def scatter(step: Step) -> list[Value | None]:
    """A slab [slots, words] with some slots replaced; the runtime says which."""
    slab = step.shape(0, I32)
    if step.node.inputs[1] != io.SLOTS or len(slab) != 2 or slab[0] != "slots":
        raise ValueError(f"{step.inputs[0]} by {step.node.inputs[1]}; expected slots of a slab")
    step.expect(1, I64, ("n", 1))
    step.expect(2, I32, ("n", slab[1]))
    return [Value(I32, slab)]


def top(step: Step) -> list[Value | None]:
    """The greatest logits and their ids."""
    if step.node.inputs != [io.LOGITS, io.COUNT]:
        raise ValueError(f"its inputs are {step.node.inputs}, expected logits and count")
    step.expect(0, F32, (1, "n", step.model.vocab_size))
    step.expect(1, I64, (1,))
    shape = (1, "n", io.COUNT)
    return [Value(F32, shape), Value(I64, shape)]
