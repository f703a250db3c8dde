"""Sessions: products of codes are exact on every processor, and widened only where needed."""

from __future__ import annotations

import numpy as np
import pytest

from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.providers import session as ort_session
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    EXACT_PRODUCTS,
    PRODUCT,
    new_session,
    products_saturate,
)

K, N = 64, 32
CODES = np.full((4, K), 255, np.uint8)
WEIGHTS = np.full((K, N), 127, np.int8)


def scaled(settings: dict[str, str] | None = None) -> F32:
    """Multiply the largest codes and weights as the prefill graph does."""
    graph = Graph()
    a = graph.input("a", np.uint8, ["m", K])
    b = graph.constant("b", WEIGHTS)
    names = [graph.constant("a_scale", np.array(1, np.float32))]
    names.append(graph.constant("b_scale", np.ones(N, np.float32)))
    names.append(graph.constant("a_zero", np.array(0, np.uint8)))
    y = graph.node("MatMulIntegerToFloat", [a, b, *names], ["y"], CONTRIB)
    graph.output(y, np.float32, ["m", N])
    (found,) = new_session(encode(graph), 1, settings=settings).run(None, {"a": CODES})
    return np.asarray(found, np.float32)


def test_products_are_exact_here() -> None:
    assert (scaled() == K * 255 * 127).all()


def test_only_those_that_saturate_are_widened() -> None:
    """Widening takes several times as long, so it is avoided where possible."""
    graph = Graph()
    product = graph.input("a", np.uint8, ["m", "k"]), graph.input("b", np.int8, ["k", "n"])
    graph.output(graph.add("MatMulInteger", product, "y"), np.int32, ["m", "n"])
    assert encode(graph) == PRODUCT
    assert products_saturate() == (scaled({EXACT_PRODUCTS: "0"}) != K * 255 * 127).any()


@pytest.mark.parametrize("saturate", [False, True])
def test_each_session_gets_the_setting(saturate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "products_saturate", lambda: saturate)
    graph = Graph()
    graph.output(graph.add("Abs", [graph.input("x", np.float32, [1])], "y"), np.float32, [1])
    session = new_session(encode(graph), 1)
    told = session.get_session_options().get_session_config_entry(EXACT_PRODUCTS)
    assert told == str(int(saturate))
    assert (scaled() == K * 255 * 127).all() or not saturate
