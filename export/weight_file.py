"""Writes a weight file of onnxruntime: each item of its plan, where the plan says that it lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.balance import Balances
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.files import BundleFile
from stem_edge.export.heads import pad_heads
from stem_edge.export.quantizers import Quantizer
from stem_edge.export.weights import RowRange, Weights
from stem_edge.graph.ir import Array, Tensor
from stem_edge.graph.linear import INT8_MAX
from stem_edge.graph.plan import Balance, Blocks, Columns, Floats, Item, Piece, Vector, WeightPlan
from stem_edge.quantize import F32, U8, dequantize_blocks, zero_points
from stem_edge.quantize import Blocks as Quantized
from stem_edge.reference import Matrix, whole


class PaddedTensors(Mapping[str, Matrix]):
    """Tensors of a checkpoint, those with a head in their shape padded to the graph's width."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Matrix]) -> None:
        self._config, self._tensors = config, tensors
        self._layer, self._padded = -1, dict[str, Matrix]()

    def __getitem__(self, name: str) -> Matrix:
        if not name.startswith("layers."):
            return self._tensors[name]
        _, number, part = name.split(".", 2)
        if self._layer != int(number):  # of one layer at a time: they are read into memory
            names = self._config.layer_shapes(int(number))
            layer = {n: self._tensors[f"layers.{number}.{n}"] for n in names}
            self._padded = dict(pad_heads(self._config, layer))
            self._layer = int(number)
        return self._padded[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class WeightFile:
    """One weight file that is being written.

    quantizer: of codes in blocks; balances: of prompts.
    """

    def __init__(
        self,
        file: BundleFile,
        tensors: Mapping[str, Matrix],
        weights: Weights,
        quantizer: Quantizer | None = None,
        balances: Balances | None = None,
    ) -> None:
        self._file, self._tensors, self._weights = file, tensors, weights
        self._quantizer, self._balances = quantizer, balances

    def write(self, plan: WeightPlan) -> None:
        """Write all items in their order. Raises CheckpointError for values that are not finite."""
        for item in plan.items:
            self._write(item)

    def _write(self, item: Item) -> None:
        match item:
            case Vector():
                self._put(item.tensor, [self._vector(item)])
            case Balance():
                self._put(item.tensor, [1 / self._balance(item.consumer)])
            case Floats():
                pieces = self._weights.stream(item.tensor.name, self._matrices(item.parts), _same)
                self._put(item.tensor, pieces)
            case Blocks():
                self._blocks(item)
            case Columns():
                self._columns(item)

    def _put(self, tensor: Tensor, pieces: Sequence[Array] | Iterator[Array]) -> None:
        """Values in C order at the tensor's place, and zeros before it."""
        self._file.write(bytes(tensor.offset - self._file.nbytes))
        for piece in pieces:
            self._file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        if (end := self._file.nbytes) != tensor.offset + tensor.nbytes:
            raise ValueError(
                f"{tensor.name} ends at {end}, planned was {tensor.offset}+{tensor.nbytes}"
            )

    def _matrices(self, parts: Sequence[str]) -> list[Matrix]:
        return [self._tensors[part] for part in parts]

    def _vector(self, item: Vector) -> F32:
        values = [self._part(part) for part in item.parts]
        joined = np.concatenate(values)
        if item.divided_by:
            joined = np.asarray(joined / self._balance(item.divided_by), np.float32)
        return joined

    def _part(self, name: str) -> F32:
        try:
            return check_finite(name, 0, whole(self._tensors[name]))
        except KeyError:  # a bias, while those that are stacked with it have one
            return np.zeros(self._tensors[name.removesuffix(".bias")].shape[0], np.float32)

    def _balance(self, consumer: str) -> F32:
        if self._balances is None:
            raise ValueError(f"{consumer} is balanced, and there are no balances")
        return self._balances.of(consumer, self._tensors)

    def _blocks(self, item: Blocks) -> None:
        """Codes as they come, then the scales and zero points that came with them."""
        if self._quantizer is None:
            raise ValueError(f"{item.name} is quantized, and there is no quantizer")
        work = self._quantizer.worker(item.name, item.kind, item.bits, item.block)

        def quantize(values: F32) -> tuple[Quantized, F32]:
            blocks = work(values)
            stored = dequantize_blocks(blocks.codes, blocks.scales, item.bits, blocks.zero_points)
            self._weights.meter.add(item.kind, values, stored)
            return blocks, stored

        for piece in item.pieces:
            matrices = self._matrices(item.parts)
            if len(item.pieces) > 1:
                matrices = [RowRange(matrices[0], piece.start, piece.stop)]
            made = list[Quantized]()
            stream = self._weights.stream(item.name, matrices, quantize)
            self._put(piece.codes, self._codes(item, stream, made))
            self._put_scales(item, piece, made)

    def _codes(
        self, item: Blocks, stream: Iterator[tuple[Quantized, F32]], made: list[Quantized]
    ) -> Iterator[U8]:
        for blocks, stored in stream:
            if self._quantizer is not None:
                self._quantizer.keep(item.name, stored)
            made.append(blocks._replace(codes=np.zeros(0, np.uint8)))
            yield blocks.codes

    def _put_scales(self, item: Blocks, piece: Piece, made: list[Quantized]) -> None:
        scales = np.concatenate([one.scales for one in made])
        self._put(piece.scales, [scales])
        if piece.points is not None:
            own = [one.zero_points for one in made if one.zero_points is not None]
            middle = [zero_points(len(scales), scales.shape[1], item.bits)]
            self._put(piece.points, own or middle)

    def _columns(self, item: Columns) -> None:
        balance = self._balance(item.consumer) if item.consumer else np.float32(1)

        def quantize(values: F32) -> tuple[U8, F32]:
            values = values * balance
            scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(INT8_MAX)
            codes = np.rint(values / np.where(scales > 0, scales, 1))
            self._weights.meter.add("prefill", values, codes * scales)
            return codes.astype(np.int8).view(np.uint8), scales[:, 0]

        made = list(self._weights.stream(item.name, self._matrices(item.parts), quantize))
        self._put(item.codes, [np.concatenate([codes for codes, _ in made]).T])
        self._put(item.scales, [scales for _, scales in made])


def _same(values: F32) -> F32:
    return values
