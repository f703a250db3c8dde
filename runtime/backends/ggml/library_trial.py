"""Worker process that tries a ggml library.

Not a command for users: `stem_edge.ggml.check` starts it, and explains why. It multiplies matrices of every type
by many columns, by one and by a few, because those use other kernels, and compares the products with numpy's.
The name of each type goes to stdout before, so that the parent can tell where a crash happened. On failure
the last line of stderr gives the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stem_edge.errors import BackendError
from stem_edge.ggml import types
from stem_edge.ggml.check import DIFFERS, REFUSED
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import OTHER_TYPES, WEIGHT_TYPES, TensorType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.ggml.graph import (
    Arena,
    GgmlGraph,
    HeldVectors,
    MappedBuffer,
    Processor,
    Scratch,
    Tensor,
)
from stem_edge.system.child import limit_this_process
from stem_edge.system.memory import page_aligned

MEMORY_NBYTES = 1 << 30
CPU_SECONDS = 120  # ends the trial even if its parent is gone and cannot kill it
WIDTH, ROWS = 512, 96
COLUMNS = 64, 1, 8
# Root mean square error over the size of the values, from rounding columns to 8 bits or adding in 16 bits, and
# from rounding a matrix, with a margin of three. A wrong kernel is far beyond them.
PRODUCT = {types.F32: 0.001}
PRODUCT_OF_CODES, ROUNDING = 0.03, 0.5


class WrongResultError(Exception):
    """A library computes something other than numpy."""


def run(path: Path) -> None:
    """Check every type, printing its name before. Raises BackendError, WrongResultError."""
    print("loading it", flush=True)
    processor = Processor(Ggml(path), 1)
    for kind in (*WEIGHT_TYPES.values(), *OTHER_TYPES):
        print(f"products of {kind.name}", flush=True)
        try:
            for found, expected, tolerance in products(processor, kind):
                compare(found, expected, tolerance)
        except WrongResultError as error:
            raise WrongResultError(f"products of {kind.name}: {error}") from error


def products(processor: Processor, kind: TensorType) -> Iterator[tuple[F32, F32, float]]:
    """Yield what ggml computes with a matrix of a type, the right values, and how far they may differ."""
    random, ggml = np.random.default_rng(0), processor.ggml
    given = random.standard_normal((ROWS, WIDTH), np.float32)
    data = page_aligned((ROWS * kind.row_nbytes(WIDTH),))
    pointers = given.ctypes.data, data.ctypes.data
    nbytes = ggml.quantize_chunk(kind.number, *pointers, 0, ROWS, WIDTH, None)
    if nbytes != data.nbytes:
        raise WrongResultError(f"{nbytes} bytes, not {data.nbytes}")
    arena, memory = Arena(ggml, 1), MappedBuffer(ggml, data)
    matrix = arena.tensor(kind, WIDTH, ROWS)
    memory.place(matrix)
    stored = computed(processor, "get_rows", matrix, np.arange(ROWS, dtype=np.int32), WIDTH)
    yield stored, given, ROUNDING
    for count in COLUMNS:
        x = random.standard_normal((count, WIDTH), np.float32)
        found = computed(processor, "mul_mat", matrix, x, ROWS)
        yield found, x @ stored.T, PRODUCT.get(kind, PRODUCT_OF_CODES)


def computed(processor: Processor, name: str, matrix: Tensor, given: np.ndarray, width: int) -> F32:
    """Return the vectors [n, width] that an operator makes of a matrix and an input."""
    graph = GgmlGraph(processor, 8)
    kind = types.I32 if given.dtype == np.int32 else types.F32
    source = graph.input(kind, *reversed(given.shape))
    result = HeldVectors(processor.ggml, width, len(given))
    made = graph.op(name, matrix, source)
    result.take(made)
    graph.emit(made)
    scratch = Scratch(processor.ggml)
    scratch.place(graph)
    graph.set(source, given)
    graph.run()
    return result.values.copy()


def compare(found: F32, expected: F32, tolerance: float) -> None:
    """Raise WrongResultError if values differ by more than `tolerance` times their size, on average."""
    distance = np.abs(found - expected).ravel()
    worst = int(np.where(np.isnan(distance), np.inf, distance).argmax())
    if not np.sqrt(np.mean(distance**2)) <= tolerance * np.sqrt(np.mean(expected**2)):
        raise WrongResultError(
            f"{len(found)} vectors, value {worst} of {found.size}: found {found.flat[worst]:.6g}, expected "
            f"{expected.flat[worst]:.6g}"
        )


def main() -> int:
    limit_this_process(MEMORY_NBYTES, CPU_SECONDS)
    try:
        run(Path(sys.argv[1]))
    except (BackendError, WrongResultError) as error:
        print(error, file=sys.stderr)
        return REFUSED if isinstance(error, BackendError) else DIFFERS
    return 0


if __name__ == "__main__":
    sys.exit(main())
