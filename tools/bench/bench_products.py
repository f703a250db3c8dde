"""Time products of 8-bit codes on this processor, in each way that onnxruntime can compute them.

    python tools/bench/bench_products.py
    python tools/processors.py avx2 -- tools/bench/bench_products.py      x86 without VNNI

as they come: u8 x s8, whose sums saturate without VNNI
widened:      u8 x u8, which stem-edge uses without VNNI (backends/onnxruntime/providers/session.py)
7 bits:       weights too small to saturate, which doubles their rounding error
s8 x s8:      exact everywhere
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import EXACT_PRODUCTS, new_session

K, N = 2048, 8192
THREADS, ROUNDS = 2, 9
TOKENS = (1, 8, 32, 128, 512)
RNG = np.random.default_rng(0)
WEIGHTS = RNG.integers(-127, 128, (K, N)).astype(np.int8)


class Way(NamedTuple):
    """Settings of one way to compute the product."""

    weights: npt.NDArray[np.int8] = WEIGHTS
    widened: bool = False
    signed: bool = False


WAYS = {
    "as they come": Way(),
    "widened": Way(widened=True),
    "7 bits": Way(weights=np.clip(WEIGHTS // 2, -64, 63).astype(np.int8)),
    "s8 x s8": Way(signed=True),
}


def graph(way: Way) -> bytes:
    """Build y float32 [m, N] = codes [m, K] x weights [K, N]; codes are int8, or uint8 around 128."""
    graph, zero = Graph(), np.int8(0) if way.signed else np.uint8(128)
    graph.input("a", np.int8 if way.signed else np.uint8, ["m", K])
    scales = np.float32(1), np.ones(N, np.float32)
    constants = {"b": way.weights, "a_scale": scales[0], "b_scale": scales[1], "a_zero": zero}
    inputs = ["a", *(graph.constant(name, np.asarray(v)) for name, v in constants.items())]
    y = graph.node("MatMulIntegerToFloat", inputs, ["y"], CONTRIB)
    graph.output(y, np.float32, ["m", N])
    return encode(graph)


def main() -> None:
    """Print milliseconds, the ratio to the first way, and whether products are exact."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"codes [tokens, {K}] x matrix [{K}, {N}], {THREADS} threads, medians of {ROUNDS} rounds")
    sessions = {
        name: new_session(graph(way), THREADS, [CPU], {EXACT_PRODUCTS: str(int(way.widened))})
        for name, way in WAYS.items()
    }
    for tokens in TOKENS:
        codes = RNG.integers(-128, 128, (tokens, K))
        given = {True: codes.astype(np.int8), False: (codes + 128).astype(np.uint8)}
        taken: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, {"a": given[WAYS[name].signed]})
                taken[name].append(time.perf_counter() - started)
        first = statistics.median(taken["as they come"])
        for name, way in WAYS.items():
            (found,) = sessions[name].run(None, {"a": given[way.signed][:1]})
            exact = np.array_equal(found, codes[:1] @ way.weights.astype(np.int64))
            middle = statistics.median(taken[name])
            print(
                f"{tokens:4} tokens  {name:14}{middle * 1e3:8.2f} ms  x {middle / first:5.2f}"
                f"  {'exact' if exact else 'wrong'}"
            )


if __name__ == "__main__":
    main()
