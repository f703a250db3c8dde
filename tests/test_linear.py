"""Matrices as onnxruntime multiplies with them, run by onnxruntime and compared with numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stem_edge.errors import CheckpointError
from stem_edge.export import linear as module
from stem_edge.export.files import BundleFile
from stem_edge.export.graph import Graph
from stem_edge.export.linear import DecodeLinear, Linear, Weights
from stem_edge.export.quantizers import Rounding, Searching
from stem_edge.export.report import ErrorMeter
from stem_edge.export.token_linear import TokenLinear
from stem_edge.formats import BackboneFormat, WeightType
from stem_edge.quantize import F32, dequantize_blocks, quantize_asymmetric
from stem_edge.reference import ArrayMatrix
from stem_edge.runtime.ort_session import new_session
from stem_edge.runtime.providers import CPU

K, T = 128, 9
RNG = np.random.default_rng(0)
MATRICES = [ArrayMatrix(RNG.standard_normal((n, K)).astype(np.float32)) for n in (64, 96)]
STACKED = np.concatenate([m.rows(0, m.shape[0]) for m in MATRICES])
X = RNG.standard_normal((1, T, K)).astype(np.float32)


@pytest.fixture
def weights() -> Iterator[Weights]:
    opened = Weights(2, ErrorMeter(), lambda nbytes: None)
    yield opened
    opened.close()


def product(
    folder: Path,
    make: Callable[[Graph], Linear],
    x: F32,
    matrices: list[ArrayMatrix],
    norm: F32 | None = None,
) -> F32:
    """x times the matrices as the emitted graph computes it, behind a norm's weight if given."""
    with BundleFile(folder / "g.data") as data:
        graph = Graph(data, "g.data")
        linear = make(graph)
        name, rows = "layers.0.qkv", sum(matrix.shape[0] for matrix in matrices)
        source = graph.input("x", np.float32, [1, "T", x.shape[-1]])
        graph.output(name, np.float32, [1, "T", rows])
        if norm is not None:
            weight = graph.constant("norm", linear.norm("norm", norm, name, matrices))
            source = graph.node("Mul", [source, weight], ["normed"])
        linear.product(name, "qkv", source, matrices)
    return run(folder, graph, {"x": x})


def run(folder: Path, graph: Graph, inputs: dict[str, Any]) -> F32:
    """The one output of an emitted graph."""
    (folder / "g.onnx").write_bytes(graph.serialize())
    (found,) = new_session(folder / "g.onnx", 1, [CPU]).run(None, inputs)
    return np.asarray(found, np.float32)


def decoding(
    weights: Weights, stored: WeightType = "fp32", block: int = 32, *, asymmetric: bool = False
) -> Callable[[Graph], Linear]:
    """Matrices as a graph for decoding has them, rounded to the nearest code."""
    format = BackboneFormat(weights=stored, head=stored, block_size=block, asymmetric=asymmetric)
    return lambda graph: DecodeLinear(graph, weights, format, Rounding(asymmetric=asymmetric))


def worst(found: F32, expected: F32) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def mean(found: F32, expected: F32) -> float:
    return float(np.abs(found - expected).mean() / np.abs(expected).mean())


def test_float(tmp_path: Path, weights: Weights) -> None:
    found = product(tmp_path, decoding(weights), X, MATRICES)
    assert worst(found, X @ STACKED.T) < 1e-6


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(
    ("stored", "block", "most"),
    [("int8", 32, 0.02), *(("int4", block, 0.25) for block in (16, 32, 64, 128))],
)
def test_blocks(
    tmp_path: Path,
    weights: Weights,
    stored: WeightType,
    block: int,
    most: float,
    asymmetric: bool,
) -> None:
    make = decoding(weights, stored, block, asymmetric=asymmetric)
    found = product(tmp_path, make, X, MATRICES)
    assert worst(found, X @ STACKED.T) < most


@pytest.mark.parametrize("stored", ["int4", "int8"])
@pytest.mark.parametrize(
    ("width", "block"), [(K, 16), (K, 32), (K, 64), (K, 128), (96, 16), (96, 32)]
)
def test_the_kernel_computes_with_the_asymmetric_matrix(
    tmp_path: Path, weights: Weights, stored: WeightType, block: int, width: int
) -> None:
    """Products with whole numbers up to 127, which int8 activations hold exactly."""
    matrix = STACKED[:, :width] + np.float32(0.3)
    x = np.rint(X[..., :width] * 30)
    x[..., ::16] = 127
    make = decoding(weights, stored, block, asymmetric=True)
    found = product(tmp_path, make, x, [ArrayMatrix(matrix)])
    bits = 4 if stored == "int4" else 8
    blocks = quantize_asymmetric(matrix, bits, block)
    exact = dequantize_blocks(blocks.codes, blocks.scales, bits, blocks.zero_points)
    assert worst(found, x @ exact.T) < 1e-5  # ARM64 adds in another order: 3.3e-6


class Keeping(Searching):
    """Remembers what became of the rows."""

    def __init__(self, *, asymmetric: bool) -> None:
        super().__init__(asymmetric=asymmetric)
        self.kept: list[F32] = []

    def keep(self, name: str, stored: F32) -> None:
        self.kept.append(stored)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("stored", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("width", [K, 96])
def test_rows_are_gathered_exactly(
    tmp_path: Path, weights: Weights, stored: WeightType, asymmetric: bool, width: int
) -> None:
    matrix = STACKED[:, :width] + np.float32(0.3)
    quantizer = Keeping(asymmetric=asymmetric)
    format = BackboneFormat(weights="fp32", head=stored, block_size=32, asymmetric=asymmetric)
    with BundleFile(tmp_path / "g.data") as data:
        graph = Graph(data, "g.data")
        graph.input("ids", np.int64, [1, "T"])
        graph.output("rows", np.float32, [1, "T", width])
        linear = DecodeLinear(graph, weights, format, quantizer)
        linear.rows("embedding", "embedding", "ids", "rows", ArrayMatrix(matrix))
    found = run(tmp_path, graph, {"ids": np.array([[5, 0, 159, 5]])})
    expected = matrix if stored == "fp32" else np.concatenate(quantizer.kept)
    assert np.array_equal(found[0], expected[[5, 0, 159, 5]])


def test_each_kind_has_its_own_type(tmp_path: Path, weights: Weights) -> None:
    format = BackboneFormat(weights="int4", head="int4", block_size=32, kinds={"qkv": "int8"})
    make = lambda graph: DecodeLinear(graph, weights, format, Rounding(asymmetric=False))
    found = product(tmp_path, make, X, MATRICES)
    assert worst(found, X @ STACKED.T) < 0.02


def test_a_matrix_of_many_rows_is_cut_without_a_difference(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for values in (1 << 24, 20 * K):
        monkeypatch.setattr(module, "SPLIT_VALUES", values)
        folder = tmp_path / str(values)
        folder.mkdir()
        found.append(product(folder, decoding(weights, "int4"), X, MATRICES[1:]))
        assert (b".4.weight" in (folder / "g.onnx").read_bytes()) == (values < 1 << 20)
    assert np.array_equal(found[0], found[1])


def test_tokens_are_scaled_one_by_one(tmp_path: Path, weights: Weights) -> None:
    """A loud token must not make the quiet ones coarse; a token of zeros stays zero."""
    x = X * np.logspace(-6, 6, T, dtype=np.float32)[None, :, None]
    x[0, 3] = 0
    found = product(tmp_path, lambda graph: TokenLinear(graph, weights, {}), x, MATRICES)
    expected = x @ STACKED.T
    for token in range(T):
        if token != 3:
            assert worst(found[:, token], expected[:, token]) < 0.02
    assert not found[0, 3].any()


def outliers(x: F32) -> F32:
    """x as trained models have it: a few channels a hundred times greater than the others."""
    scales = np.ones(K, np.float32)
    scales[[5, 77, 100]] = 100
    return x * scales


def test_outliers_are_balanced_through_the_norm(tmp_path: Path, weights: Weights) -> None:
    norm = outliers(np.ones(K, np.float32))
    expected = (X * norm) @ STACKED.T
    peaks = {"layers.0.qkv": np.abs(X * norm)[0].max(axis=0)}
    errors = []
    for number, known in enumerate(({}, peaks)):
        folder = tmp_path / str(number)
        folder.mkdir()
        make = lambda graph: TokenLinear(graph, weights, known)  # noqa: B023
        found = product(folder, make, X, MATRICES, norm)
        # Without the three channels, whose share of the sum hides what the others lost.
        errors.append(mean(found, expected))
    assert errors[1] < 0.5 * errors[0]


def test_outliers_without_a_norm_are_balanced_by_a_multiplication(
    tmp_path: Path, weights: Weights
) -> None:
    x = outliers(X)
    small = [
        ArrayMatrix(m.rows(0, m.shape[0]) / outliers(np.ones(K, np.float32))) for m in MATRICES
    ]
    expected = X @ STACKED.T
    errors = []
    for number, known in enumerate(({}, {"layers.0.qkv": np.abs(x)[0].max(axis=0)})):
        folder = tmp_path / str(number)
        folder.mkdir()
        make = lambda graph: TokenLinear(graph, weights, known)  # noqa: B023
        errors.append(mean(product(folder, make, x, small), expected))
        assert (b"balanced" in (folder / "g.onnx").read_bytes()) == bool(known)
    assert errors[1] < 0.1 * errors[0]


def test_even_channels_get_no_multiplication(tmp_path: Path, weights: Weights) -> None:
    peaks = {"layers.0.qkv": np.abs(X)[0].max(axis=0)}
    product(tmp_path, lambda graph: TokenLinear(graph, weights, peaks), X, MATRICES)
    assert b"balanced" not in (tmp_path / "g.onnx").read_bytes()


def test_a_value_that_is_not_finite_is_named(tmp_path: Path, weights: Weights) -> None:
    bad = MATRICES[0].rows(0, 64).copy()
    bad[40, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"layers.0.qkv: 1 NaN .* row 40"):
        product(tmp_path, decoding(weights, "int4"), X, [ArrayMatrix(bad)])
