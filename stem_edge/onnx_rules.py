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

F32, U8, I64 = "float32", "uint8", "int64"


class Step(NamedTuple):
    """A node with what is known of its inputs; None: one that is left out."""

    node: Node
    inputs: list[Value | None]
    model: ModelConfig
    layout: RecordLayout | None

    def value(self, index: int, *types: str) -> Value:
        """An input that must be there, of one of these types."""
        value = self.inputs[index]
        if value is None or value.type not in types:
            expected = " or ".join(types)
            raise ValueError(f"input {index} is {value or 'left out'}, expected {expected}")
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
    value = step.value(0, F32, I64)
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
    step.expect(1, F32, (width,))
    check_epsilon(step)
    return [Value(F32, step.shape(0))]


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
    return [Value(F32, (*outer, size)) for size in known]
