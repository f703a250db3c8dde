"""Worker process that tests a ggml library: it multiplies ones with matrices of ones, of every type.

Not a command for users: `stem_edge.ggml.check` starts it, and explains why. It prints each type's name before
its products, so that the parent can tell where a crash happened. On failure the last line of stderr gives
the reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from stem_edge.errors import BackendError
from stem_edge.ggml import types
from stem_edge.ggml.check import REBUILD, REFUSED
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
)
from stem_edge.system.child import limit_this_process
from stem_edge.system.memory import page_aligned

MEMORY_NBYTES = 1 << 30
CPU_SECONDS = 120  # ends the trial even if its parent is gone and cannot kill it
WIDTH, ROWS = 512, 96
COLUMNS = 64, 1, 8  # vectors at once, which use other kernels
TOLERANCE = 0.1  # of rounding; a wrong kernel is far beyond


def run(path: Path) -> None:
    """Check products with every type, and print its name before. Raises BackendError if one is wrong."""
    print("loading it", flush=True)
    processor = Processor(Ggml(path), 1)
    for kind in (*WEIGHT_TYPES.values(), *OTHER_TYPES):
        print(f"products of {kind.name}", flush=True)
        for count in COLUMNS:
            found = product(processor, kind, count)
            if not np.abs(found / WIDTH - 1).max() < TOLERANCE:
                raise BackendError(
                    f"ggml in {path} computes wrong numbers on this processor: products of "
                    f"{kind.name}, {count} vectors: found up to {found.max():.6g}, expected {WIDTH}; {REBUILD}"
                )


def product(processor: Processor, kind: TensorType, count: int) -> F32:
    """Return the product [count, ROWS] of `count` vectors of ones with a matrix of ones."""
    ggml, ones = processor.ggml, np.ones((max(ROWS, count), WIDTH), np.float32)
    data = page_aligned((ROWS * kind.row_nbytes(WIDTH),))
    ggml.quantize_chunk(kind.number, ones.ctypes.data, data.ctypes.data, 0, ROWS, WIDTH, None)
    arena, memory = Arena(ggml, 1), MappedBuffer(ggml, data)
    memory.place(matrix := arena.tensor(kind, WIDTH, ROWS))
    graph, result = GgmlGraph(processor, 8), HeldVectors(ggml, ROWS, count)
    source = graph.input(types.F32, WIDTH, count)
    result.take(made := graph.op("mul_mat", matrix, source))
    graph.emit(made)
    scratch = Scratch(ggml)
    scratch.place(graph)
    graph.set(source, ones[:count])
    graph.run()
    return result.values.copy()


def main() -> int:
    limit_this_process(MEMORY_NBYTES, CPU_SECONDS)
    try:
        run(Path(sys.argv[1]))
    except BackendError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
