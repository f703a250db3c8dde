"""Matrix products in graphs, run by onnxruntime and compared with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stem_edge.export.backbone.weight_file import WeightFile, worth_balancing
from stem_edge.export.job.files import create_file
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.quantization.quantizers import Quantizer, nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph import linear as module
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat, WeightType
from stem_edge.graph.ir import Array, Graph
from stem_edge.graph.linear import Products
from stem_edge.graph.prompt_products import PromptProducts
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.matrix import ArrayMatrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import dequantize_blocks, quantize_asymmetric
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, new_session

K, T = 128, 9
RNG = np.random.default_rng(0)
MATRICES = [RNG.standard_normal((n, K)).astype(np.float32) for n in (64, 96)]
STACKED = np.concatenate(MATRICES)
X = RNG.standard_normal((1, T, K)).astype(np.float32)


Make = Callable[[Graph, WeightPlan], Products]
NAME = "layers.0.wo"  # of the product
UNUSED = nearest(
    BackboneFormat(weights="int8", head="int8", block_size=32)
)  # if no matrix has blocks


class Built:
    """A graph over a weight file, and what goes into that."""

    def __init__(self, **tensors: F32) -> None:
        self.graph, self.plan = Graph(), WeightPlan("g.data")
        self._tensors = {name: ArrayMatrix(values) for name, values in tensors.items()}

    def run(
        self,
        folder: Path,
        inputs: dict[str, Any],
        quantizer: Quantizer = UNUSED,
        peaks: Mapping[str, F32] | None = None,
    ) -> F32:
        """Run the graph and return its only output."""
        path = folder / self.plan.file
        weights = MatrixReader(2, ErrorMeter(), lambda nbytes: None)
        with create_file(path) as data:
            WeightFile(data, self._tensors, weights, quantizer, peaks).write(self.plan)
        session = new_session(GraphSource("g", encode(self.graph), folder), 1)
        (found,) = session.run(None, inputs)
        return np.asarray(found, np.float32)


def build(make: Make, matrices: Sequence[F32], norm: F32 | None = None) -> Built:
    """x times matrices; norm: weight of a norm before that, which is a multiplication here."""
    parts = {f"m{n}": matrix for n, matrix in enumerate(matrices)}
    built = Built(**parts, **({} if norm is None else {"norm": norm}))
    products, width = make(built.graph, built.plan), matrices[0].shape[1]
    rows = sum(len(matrix) for matrix in matrices)
    source = built.graph.input("x", np.float32, [1, "T", width])
    built.graph.output(NAME, np.float32, [1, "T", rows])
    if norm is not None:
        source = built.graph.add("Mul", [source, products.norm("norm", width, NAME)], "normed")
    products.product(NAME, "wo", source, tuple(parts), (rows, width))
    return built


def decoding(format: BackboneFormat) -> Make:
    """Matrices as a graph for decoding has them."""
    return lambda graph, plan: Products(graph, plan, format)


def prompts(balanced: tuple[str, ...]) -> Make:
    """Make the products of a graph for prompts."""
    format = BackboneFormat(weights="int8", head="int8", block_size=32, balanced=balanced)
    return lambda graph, plan: PromptProducts(graph, plan, format)


def of_type(stored: WeightType, block: int = 32, *, asymmetric: bool = False) -> BackboneFormat:
    return BackboneFormat(weights=stored, head=stored, block_size=block, asymmetric=asymmetric)


def product(
    folder: Path, format: BackboneFormat, x: F32 = X, matrices: Sequence[F32] = MATRICES
) -> F32:
    """x times the matrices, rounded to the nearest code, as a graph for decoding computes it."""
    quantizer = nearest(format)
    return build(decoding(format), matrices).run(folder, {"x": x}, quantizer)


def prompt(
    folder: Path,
    x: F32,
    matrices: Sequence[F32],
    peaks: Mapping[str, F32],
    norm: F32 | None = None,
) -> F32:
    """Compute the products as a graph for prompts does, balanced where the exporter would."""
    balanced = worth_balancing(peaks, build(prompts(()), matrices, norm).plan)
    return build(prompts(balanced), matrices, norm).run(folder, {"x": x}, peaks=peaks)


def worst(found: F32, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def mean(found: F32, expected: Array) -> float:
    return float(np.abs(found - expected).mean() / np.abs(expected).mean())


@pytest.mark.parametrize("stored", ["int4", "int8"])
@pytest.mark.parametrize(
    ("width", "block"), [(K, 16), (K, 32), (K, 64), (K, 128), (96, 16), (96, 32)]
)
def test_the_kernel_computes_with_the_asymmetric_matrix(
    tmp_path: Path, stored: WeightType, block: int, width: int
) -> None:
    """Products with whole numbers up to 127, which int8 activations hold exactly."""
    matrix = STACKED[:, :width] + np.float32(0.3)
    x = np.rint(X[..., :width] * 30)
    x[..., ::16] = 127
    found = product(tmp_path, of_type(stored, block, asymmetric=True), x, [matrix])
    bits = 4 if stored == "int4" else 8
    blocks = quantize_asymmetric(matrix, bits, block)
    exact = dequantize_blocks(blocks.codes, blocks.scales, bits, blocks.zero_points)
    assert worst(found, x @ exact.T) < 1e-5  # ARM64 adds in another order: 3.3e-6


def stored_rows(matrix: F32, format: BackboneFormat, kind: str) -> F32:
    """Rows of a matrix as they are stored, rounded to the nearest code."""
    bits = {"fp32": 32, "int8": 8, "int4": 4}[format.head]
    if bits == 32:
        return matrix
    work = nearest(format)("embedding", kind, bits, 32)
    return dequantize_blocks(
        work(matrix).codes, work(matrix).scales, bits, work(matrix).zero_points
    )


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("stored", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("width", [K, 96])
def test_rows_are_gathered_exactly(
    tmp_path: Path, stored: WeightType, asymmetric: bool, width: int
) -> None:
    matrix = STACKED[:, :width] + np.float32(0.3)
    format = BackboneFormat(weights="fp32", head=stored, block_size=32, asymmetric=asymmetric)
    built = Built(embedding=matrix)
    built.graph.output("rows", np.float32, [1, "T", width])
    products = Products(built.graph, built.plan, format)
    ids = built.graph.input("ids", np.int64, [1, "T"])
    products.rows(ids, "rows", matrix.shape)
    feeds = {"ids": np.array([[5, 0, 159, 5]])}
    found = built.run(tmp_path, feeds, nearest(format))
    expected = stored_rows(matrix, format, "embedding")
    assert np.array_equal(found[0], expected[[5, 0, 159, 5]])


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("stored", ["fp32", "int8", "int4"])
def test_a_matrix_that_is_embedding_and_head_is_stored_once(
    tmp_path: Path, stored: WeightType, asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is cut where mappings can begin, and multiplies the rows that are gathered."""
    monkeypatch.setattr(module, "SPLIT_VALUES", 20 * K)
    monkeypatch.setattr(module, "LARGE_ALIGNMENT", 16 * K)
    matrix = STACKED + np.float32(0.3)
    format = BackboneFormat(
        weights="fp32", head=stored, block_size=32, asymmetric=asymmetric, tied=True
    )
    built = Built(embedding=matrix)
    graph, products = built.graph, Products(built.graph, built.plan, format)
    x = graph.input("x", np.float32, [1, "T", K])
    products.product("logits", "head", x, ("embedding",), matrix.shape)
    graph.output("logits", np.float32, [1, "T", len(matrix)])
    size = built.plan.nbytes
    ids = graph.input("ids", np.int64, [1, "T"])
    products.rows(ids, "rows", matrix.shape)
    assert built.plan.nbytes == size
    assert sum(node.op == "MatMulNBits" for node in graph.nodes) == (
        0 if stored == "fp32" else {"int4": 5, "int8": 10}[stored]
    )
    feeds = {"x": X, "ids": np.arange(T)[None]}
    quantizer, expected = nearest(format), stored_rows(matrix, format, "head")
    assert worst(built.run(tmp_path, feeds, quantizer), X @ expected.T) < 0.02
    del graph.outputs["logits"]
    graph.output("rows", np.float32, [1, "T", K])
    (tmp_path / "rows").mkdir()
    assert np.array_equal(built.run(tmp_path / "rows", feeds, quantizer)[0], expected[:T])


def test_tokens_are_scaled_one_by_one(tmp_path: Path) -> None:
    """A loud token must not make the quiet ones coarse; a token of zeros stays zero."""
    x = X * np.logspace(-6, 6, T, dtype=np.float32)[None, :, None]
    x[0, 3] = 0
    found = prompt(tmp_path, x, MATRICES, {})
    expected: F32 = np.asarray(x @ STACKED.T, np.float32)
    for token in range(T):
        if token != 3:
            assert worst(found[:, token], expected[:, token]) < 0.02
    assert not found[0, 3].any()


def outliers(x: F32) -> F32:
    """x as trained models have it: a few channels a hundred times greater than the others."""
    scales = np.ones(K, np.float32)
    scales[[5, 77, 100]] = 100
    return x * scales


def test_outliers_are_balanced_through_the_norm(tmp_path: Path) -> None:
    norm = outliers(np.ones(K, np.float32))
    expected: F32 = np.asarray((X * norm) @ STACKED.T, np.float32)
    errors = [
        # Without the three channels, whose share of the sum hides what the others lost.
        mean(prompt(tmp_path / str(len(peaks)), X, MATRICES, peaks, norm), expected)
        for peaks in ({}, {NAME: np.abs(X * norm)[0].max(axis=0)})
    ]
    assert errors[1] < 0.5 * errors[0]


def test_outliers_without_a_norm_are_balanced_by_a_multiplication(tmp_path: Path) -> None:
    x = outliers(X)
    small = [matrix / outliers(np.ones(K, np.float32)) for matrix in MATRICES]
    errors = [
        mean(
            prompt(tmp_path / str(len(peaks)), x, small, peaks),
            X @ STACKED.T,
        )
        for peaks in ({}, {NAME: np.abs(x)[0].max(axis=0)})
    ]
    assert errors[1] < 0.1 * errors[0]
