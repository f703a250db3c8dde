"""Time exact products of 8-bit codes on this processor, in each way that onnxruntime has.

    python tools/bench/bench_products.py
    python tools/processors.py avx2 -- tools/bench/bench_products.py      x86 without VNNI

as they come: u8 x s8, whose sums saturate where there is no VNNI; widened: u8 x u8, which is what
stem-edge asks for there (stem_edge/runtime/ort_session.py); 7 bits: weights so small that nothing
saturates, which doubles their rounding; s8 x s8: exact everywhere.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from stem_edge.runtime.ort_session import EXACT_PRODUCTS, new_session
from stem_edge.runtime.providers import CPU

K, N = 2048, 8192
THREADS, ROUNDS = 2, 9
TOKENS = (1, 8, 32, 128, 512)
Codes = npt.NDArray[np.int8]


def graph(weights: Codes, *, signed: bool) -> bytes:
    """y float32 [m, N] = codes [m, K] times weights, codes signed or around 128."""
    kind = TensorProto.INT8 if signed else TensorProto.UINT8
    zero = np.int8(0) if signed else np.uint8(128)
    constants = {"b": weights, "a_scale": np.float32(1), "b_scale": np.ones(N, np.float32)}
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()]
    tensors.append(numpy_helper.from_array(np.asarray(zero), "a_zero"))
    a = helper.make_tensor_value_info("a", kind, ["m", K])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", N])
    inputs = ["a", "b", "a_scale", "b_scale", "a_zero"]
    node = helper.make_node("MatMulIntegerToFloat", inputs, ["y"], domain="com.microsoft")
    model: onnx.ModelProto = helper.make_model(
        helper.make_graph([node], "product", [a], [y], tensors),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    data: bytes = model.SerializeToString()
    return data


def main() -> None:
    """Print milliseconds, the ratio to the first way, and whether the products were exact."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"codes [tokens, {K}] x matrix [{K}, {N}], {THREADS} threads, medians of {ROUNDS} rounds")
    rng = np.random.default_rng(0)
    weights: Codes = rng.integers(-127, 128, (K, N)).astype(np.int8)
    small: Codes = np.clip(weights // 2, -64, 63).astype(np.int8)
    as_is, widened = {EXACT_PRODUCTS: "0"}, {EXACT_PRODUCTS: "1"}
    ways: dict[str, tuple[Any, Codes, bool]] = {
        "as they come": (as_is, weights, False),
        "widened": (widened, weights, False),
        "7 bits": (as_is, small, False),
        "s8 x s8": (as_is, weights, True),
    }
    sessions = {
        name: new_session(graph(matrix, signed=signed), THREADS, [CPU], settings)
        for name, (settings, matrix, signed) in ways.items()
    }
    for tokens in TOKENS:
        codes = rng.integers(-128, 128, (tokens, K))
        given = {n: codes.astype(np.int8) if w[2] else (codes + 128).astype(np.uint8)
                 for n, w in ways.items()}  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, {"a": given[name]})
                taken[name].append(time.perf_counter() - started)
        first = statistics.median(taken["as they come"])
        for name, session in sessions.items():
            (found,) = session.run(None, {"a": given[name][:1]})
            exact = np.array_equal(found, codes[:1] @ ways[name][1].astype(np.int64))
            middle = statistics.median(taken[name])
            print(
                f"{tokens:4} tokens  {name:14}{middle * 1e3:8.2f} ms  x {middle / first:5.2f}"
                f"  {'exact' if exact else 'wrong'}"
            )


if __name__ == "__main__":
    main()
