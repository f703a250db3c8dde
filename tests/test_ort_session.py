"""Products of codes are exact on every processor, and widened only where they would saturate."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stem_edge.quantize import F32
from stem_edge.runtime import ort_session
from stem_edge.runtime.ort_session import EXACT_PRODUCTS, PRODUCT, new_session, products_saturate
from stem_edge.runtime.providers import CPU

K, N = 64, 32
CODES = np.full((4, K), 255, np.uint8)
WEIGHTS = np.full((K, N), 127, np.int8)


def test_the_product_is_what_it_says() -> None:
    model = onnx.load_model_from_string(PRODUCT)
    onnx.checker.check_model(model)
    (node,) = model.graph.node
    assert (node.op_type, [*node.input]) == ("MatMulInteger", ["a", "b"])
    kinds = [value.type.tensor_type.elem_type for value in model.graph.input]
    assert kinds == [TensorProto.UINT8, TensorProto.INT8]


def scaled(settings: dict[str, str] | None = None) -> F32:
    """The greatest codes times the greatest weights, as the prefill graph multiplies them."""
    values = {
        "b": WEIGHTS,
        "a_scale": np.float32(1),
        "b_scale": np.ones(N, np.float32),
        "a_zero": np.uint8(0),
    }
    constants = [numpy_helper.from_array(np.asarray(v), name) for name, v in values.items()]
    a = helper.make_tensor_value_info("a", TensorProto.UINT8, ["m", K])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", N])
    domain = "com.microsoft"
    node = helper.make_node("MatMulIntegerToFloat", ["a", *values], ["y"], domain=domain)
    node.input[:] = ["a", "b", "a_scale", "b_scale", "a_zero"]
    model: onnx.ModelProto = helper.make_model(
        helper.make_graph([node], "g", [a], [y], constants),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)],
        ir_version=10,
    )
    (found,) = new_session(model.SerializeToString(), 1, [CPU], settings).run(None, {"a": CODES})
    return np.asarray(found, np.float32)


def test_products_are_exact_here() -> None:
    assert (scaled() == K * 255 * 127).all()


def test_only_those_that_saturate_are_widened() -> None:
    """Which takes several times as long where it is not needed."""
    assert products_saturate() == (scaled({EXACT_PRODUCTS: "0"}) != K * 255 * 127).any()


@pytest.mark.parametrize("saturate", [False, True])
def test_each_session_is_told(saturate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "products_saturate", lambda: saturate)
    session = new_session(PRODUCT, 1, [CPU])
    told = session.get_session_options().get_session_config_entry(EXACT_PRODUCTS)
    assert told == str(int(saturate))
    assert (scaled() == K * 255 * 127).all() or not saturate
