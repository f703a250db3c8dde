"""Writes a weight file for onnxruntime, with each item at its offset in the WeightPlan.

Weights for prompts are balanced: inputs with outliers are divided by a factor for each channel, and the
weights are multiplied by it (SmoothQuant, arXiv 2211.10438).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import check_finite
from stem_edge.export.checkpoints.head_padding import pad_heads
from stem_edge.export.job.files import BundleFile
from stem_edge.export.quantization.quantizers import Quantizer, with_low_bits
from stem_edge.export.quantization.streams import MatrixReader, RowSpan, all_rows
from stem_edge.export.tensor_files.gguf_tensor import with_codes
from stem_edge.export.tensor_files.tensor import codes_of
from stem_edge.graph.ir import Array, Tensor
from stem_edge.graph.prompt_products import INT8_MAX
from stem_edge.graph.special.steps import capped_width, places
from stem_edge.graph.weight_plan import (
    Balance,
    Blocks,
    Columns,
    Floats,
    Named,
    PlanItem,
    RowRange,
    Vector,
    WeightPlan,
)
from stem_edge.numerics.matrix import Matrix, whole
from stem_edge.numerics.quantize import F32, U8, zero_points
from stem_edge.numerics.quantizing import Rounded as Quantized
from stem_edge.numerics.quantizing import pack_codes

# A channel is an outlier if its peak is this many times the median peak. For smaller outliers,
# balancing gains less exactness than the pass over the inputs costs time.
OUTLIER = 8.0


class PaddedTensors(dict[str, Matrix]):
    """Tensors of a checkpoint by name; zeros pad each attention head to the graph's head width.

    Holds those of one layer only, because padding reads a layer into memory.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Matrix]) -> None:
        super().__init__()
        self._config, self._tensors = config, tensors

    def __missing__(self, name: str) -> Matrix:
        if not name.startswith("layers."):
            return self._tensors[name]
        _, number, part = name.split(".", 2)
        at, names = f"layers.{number}.", self._config.layer_shapes(int(number))
        layer = {n: self._tensors[at + n] for n in names}
        padded = pad_heads(self._config, int(number), layer)
        self.clear()
        self.update({at + n: matrix for n, matrix in padded.items()})
        return padded[part]


class WeightFile:
    """Writer of a weight file. It quantizes matrices while it writes them.

    peaks: name of a matrix product -> greatest magnitude of each input channel [K], for SmoothQuant; other
    names (KV-cache scales, a draft model's token order) -> array to write unchanged. keeps_blocks: copy
    quantized blocks of a GGUF checkpoint, because the quantizer would return the same codes.
    """

    def __init__(
        self,
        file: BundleFile,
        tensors: Mapping[str, Matrix],
        weights: MatrixReader,
        quantizer: Quantizer,
        peaks: Mapping[str, Array] | None = None,
        *,
        keeps_blocks: bool = False,
    ) -> None:
        self._file, self._tensors, self._weights = file, tensors, weights
        self._keeps_blocks = keeps_blocks
        self._quantizer, self._peaks = quantizer, peaks or {}
        # Consumer of an input -> names of all matrices that multiply this input.
        self._consumed: dict[str, list[str]] = {}
        self._balances: dict[str, F32] = {}  # of the last consumer only

    def write(self, plan: WeightPlan) -> None:
        """Write all items of a plan. Raises CheckpointError for values that are not finite."""
        for item in plan.items:
            if isinstance(item, Columns) and item.consumer:
                self._consumed.setdefault(item.consumer, []).extend(item.parts)
        for item in plan.items:
            self._write(item)

    def _write(self, item: PlanItem) -> None:
        match item:
            case Vector():
                self._put(item.tensor, [self._vector(item)])
            case Named():
                self._put(item.tensor, [self._peaks[item.tensor.name]])
            case Balance():
                self._put(item.tensor, [1 / self._balance(item.consumer)])
            case Floats():
                rows = all_rows(self._tensors[part] for part in item.parts)
                self._put(item.tensor, self._weights.stream(item.tensor.name, rows, lambda x: x))
            case Blocks():
                self._blocks(item)
            case Columns():
                self._columns(item)

    def _put(self, tensor: Tensor, pieces: Sequence[Array] | Iterator[Array]) -> None:
        """Write zeros up to the tensor's offset, then its values (`pieces`) in C order."""
        self._file.write(bytes(tensor.offset - self._file.nbytes))
        for piece in pieces:
            self._file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        if (end := self._file.nbytes) != tensor.offset + tensor.nbytes:
            raise ValueError(
                f"{tensor.name} ends at {end}; expected {tensor.offset} + {tensor.nbytes}"
            )

    def _vector(self, item: Vector) -> F32:
        joined = np.concatenate([self._part(part) for part in item.parts])
        factors = self._balance(item.divided_by) if item.divided_by else np.float32(1)
        return np.asarray(joined / factors, np.float32)

    def _part(self, name: str) -> F32:
        try:
            return check_finite(name, 0, whole(self._tensors[name]))
        except KeyError:  # no bias, but other matrices of the same product have one
            return np.zeros(self._tensors[name.removesuffix(".bias")].shape[0], np.float32)

    def _balance(self, product: str) -> F32:
        """Return the SmoothQuant factors [K] that divide the input channels of a matrix product."""
        if product not in self._balances:
            matrices = [self._tensors[part] for part in self._consumed[product]]
            self._balances = {product: _balance(self._peaks.get(product), matrices)}
        return self._balances[product]

    def _blocks(self, item: Blocks) -> None:
        """Write a quantized matrix: its codes, then its scales, offsets and zero points."""
        matrices: Sequence[Matrix] = [self._tensors[part] for part in item.parts]
        if kept := [one for one in matrices if codes_of(one)] or self._stored(item):
            matrices = kept
            work: Callable[[RowSpan], Quantized] = partial(self._stored_rows, item)
        else:
            work = self._quantized(item)
        for piece in item.pieces:
            rows, made = all_rows(matrices), list[Quantized]()
            if len(item.pieces) > 1:
                rows = [(matrices[0], piece.start, piece.stop)]
            self._put(
                piece.codes, _codes(self._weights.in_order(work, self._weights.spans(rows)), made)
            )
            self._put_scales(item, piece, made)

    def _quantized(self, item: Blocks) -> Callable[[RowSpan], Quantized]:
        """Return a function that reads some rows of a matrix and quantizes them."""
        if item.step:
            raise ExportError(
                f"{item.name} was trained with ranges for its own codes, which are gone; take --type fp32"
            )
        work = self._quantizer(item.name, item.kind, item.bits, item.block)
        if item.pieces[0].low is not None:
            work = partial(with_low_bits, work)
        return lambda span: work(self._weights.read(item.name, span))

    def _stored(self, item: Blocks) -> Sequence[Matrix]:
        """Return the matrices of `item` if all their GGUF codes can be copied; else ()."""
        parts = [with_codes(self._tensors[part]) for part in item.parts if self._keeps_blocks]
        same = [
            part
            for part in parts
            if part is not None
            and (codes := part.codes) is not None
            and (codes.bits, codes.group_size) == (item.bits, item.block)
            and (codes.offsets is None or item.pieces[0].offsets is not None)
        ]
        return same if len(same) == len(item.parts) else ()

    def _stored_rows(self, item: Blocks, span: RowSpan) -> Quantized:
        """Read the checkpoint's codes and scales of some rows, in the weight file's layout."""
        matrix, start, stop = span
        if (stored := codes_of(matrix)) is None:
            raise TypeError(f"{item.name} has no codes")
        codes, scales = stored.read(start, stop), stored.scales(start, stop)
        self._weights.count(item.name, 4 * codes.size)
        check_finite(item.name, start, scales)
        width = codes.shape[1]
        if item.step:
            first, last = item.columns
            width, middle = last - first, 1 << (item.bits - 1)
            wide = capped_width(width, item.block)
            laid = np.full((len(codes), wide), middle, np.uint8)
            moved = np.uint8(middle - (1 << (stored.bits - 1)))
            laid[:, places(width, item.block)] = codes[:, first:last] + moved
            codes, width, scales = laid, wide, scales * np.float32(item.step)
        times = width // item.block // scales.shape[1]
        groups = np.ascontiguousarray(np.repeat(scales, times, axis=1))
        points = None
        if item.pieces[0].points is not None:
            points = zero_points(len(groups), groups.shape[1], item.bits)
        offsets = None
        if item.pieces[0].offsets is not None:
            read = stored.offsets or (lambda start, stop: np.zeros_like(groups))
            offsets = check_finite(item.name, start, read(start, stop))
        return Quantized(pack_codes(codes, item.bits), groups, points, offsets)

    def _put_scales(self, item: Blocks, piece: RowRange, made: list[Quantized]) -> None:
        scales = [blocks.scales for blocks in made]
        self._put(piece.scales, scales)
        if piece.offsets is not None:
            own = [blocks.offsets for blocks in made if blocks.offsets is not None]
            self._put(piece.offsets, own)
        if piece.points is not None:
            points = [blocks.zero_points for blocks in made if blocks.zero_points is not None]
            middle = [zero_points(len(of), of.shape[1], item.bits) for of in scales]
            self._put(piece.points, points or middle)
        if piece.low is not None and piece.low.points is not None:
            self._put(piece.low.codes, [blocks.low for blocks in made if blocks.low is not None])
            self._put(piece.low.points, middle)

    def _columns(self, item: Columns) -> None:
        balance = self._balance(item.consumer) if item.consumer else np.float32(1)

        def quantize(values: F32) -> tuple[U8, F32]:
            values = values * balance
            scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(INT8_MAX)
            codes = np.rint(values / np.where(scales > 0, scales, 1))
            return codes.astype(np.int8).view(np.uint8), scales[:, 0]

        rows = all_rows(self._tensors[part] for part in item.parts)
        made = list(self._weights.stream(item.name, rows, quantize))
        self._put(item.codes, [np.concatenate([codes for codes, _ in made]).T])
        self._put(item.scales, [scales for _, scales in made])


def _codes(stream: Iterator[Quantized], made: list[Quantized]) -> Iterator[U8]:
    """Yield the codes of each piece of rows; append scales, zero points and offsets to `made`."""
    for blocks in stream:
        made.append(blocks._replace(codes=np.zeros(0, np.uint8)))
        yield blocks.codes


def _balance(peaks: F32 | None, matrices: list[Matrix]) -> F32:
    """Return SmoothQuant factors [K]: sqrt(peak input / peak weight); all 1 without peaks."""
    width = matrices[0].shape[1]
    if peaks is None or len(peaks) != width:
        return np.ones(width, np.float32)
    columns = np.maximum.reduce([np.abs(whole(matrix)).max(axis=0) for matrix in matrices])
    known = (peaks > 0) & (columns > 0)
    balance = np.sqrt(np.where(known, peaks, 1) / np.where(known, columns, 1))
    balance = np.where(known, balance, np.median(balance[known]) if known.any() else 1)
    return np.asarray(balance, np.float32)


def worth_balancing(peaks: Mapping[str, F32], plan: WeightPlan) -> tuple[str, ...]:
    """List the products with outlier input channels, worth an extra multiplication (SmoothQuant).

    peaks: product -> greatest magnitude of each input channel [K]. Products whose input is a norm's output are not
    listed: the norm's weight is divided by the factors, so they need no extra multiplication.
    """
    plain = [item for item in plan.items if isinstance(item, Columns) and not item.consumer]
    seen = {item.name: peaks[item.name] for item in plain if item.name in peaks}
    return tuple(
        item.name
        for item in plain
        if len(found := seen.get(item.name, ())) == item.codes.dims[0]
        and np.max(found) > OUTLIER * np.median(found)
    )
