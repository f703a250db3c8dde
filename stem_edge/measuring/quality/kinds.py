"""Cost of quantizing each kind of tensor on a text, and the fewest bits under a bound.

The reference model computes the text in float32, once for each kind with that kind alone as an
export would store it. So no bundle is written, and the checkpoint is read a layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from stem_edge.bundle.footprint import kinds_of
from stem_edge.errors import InputError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.exporter import read_source
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.job.trained_grid import keep_trained_grid
from stem_edge.export.quantization.calibration import read_token_ids, sequences
from stem_edge.graph.formats import MATRIX_KINDS, BackboneFormat
from stem_edge.graph.layer import kind_of
from stem_edge.numerics.block_search import search_blocks
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.matrix import ArrayMatrix, IndexedMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32, Blocks, dequantize_blocks, fitting_block
from stem_edge.numerics.reference import Tokens, embed, head_forward, layer_forward
from stem_edge.progress import Progress

ROWS = "rows"  # of the tables, beside the kinds of matrices
FEW, MANY = 4, 8  # bits
GROUPS = {FEW: 32, MANY: 128}  # values of a row that share a scale
LOGITS_NBYTES = 128 << 20
TOKENS = 1024  # of the text, from all over it

Bits = Mapping[str, int]  # kind -> bits; other kinds are exact


@dataclass(frozen=True)
class KindCost:
    """Mean divergence from the checkpoint, in nats, with one kind of tensor quantized."""

    kind: str
    values: int
    nats: dict[int, float]  # by bits


@dataclass(frozen=True)
class Recipe:
    """Bits of every kind, and the mean divergence of all of them together, in nats."""

    bits: dict[str, int]
    nats: float


@dataclass(frozen=True)
class KindCosts:
    """Costs of all kinds on a text, and the recipes that follow."""

    checkpoint: str
    tokens: int
    block_size: int
    kinds: tuple[KindCost, ...]
    default: Recipe  # what an export takes unless told otherwise
    within: Recipe | None  # one of few bytes under the bound; None if 8 bits are not enough


def kind_costs(
    checkpoint: str | Path,
    text: str | Path,
    *,
    max_kl: float | None = None,
    tokens: int = TOKENS,
    progress: bool | None = None,
) -> KindCosts:
    """Measure what 4 and 8 bits cost in each kind of matrix, and in the rows of the tables.

    text: a file in UTF-8, or token ids as .npy or .int32; tokens: how many of it are used.
    max_kl: bound of the mean divergence in nats, for `within`. Default: that of the default recipe.
    Raises InputError for a bound below zero, CheckpointError, ExportError.
    """
    if max_kl is not None and not max_kl >= 0:
        raise InputError(f"max_kl is {max_kl}; expected 0 nats or more, such as 0.05")
    source, converted = read_source(checkpoint, ExportOptions())
    ids = read_token_ids(text, converted, source.config.vocab_size)
    source, options = keep_trained_grid(source, ExportOptions())
    format = cast(BackboneFormat, options.format)
    values = _values(source)
    usual = {k: format.bits(k) for k in MATRIX_KINDS if k in values}
    tables = options.stored_tables.kind if options.stored_tables else ""
    rows = {ROWS: FEW if tables == "int4" else MANY} if ROWS in values else {}
    parts = sequences(ids, tokens, source.config.max_context)
    with Progress(0, f"measuring {checkpoint}", progress) as bar:
        text_run = _Text(source, parts, format.block_size, bar)
        alone = [{kind: bits} for kind in values for bits in (FEW, MANY)]
        *costs, default = text_run.divergences([*alone, usual | rows])
        found = iter(costs)
        kinds = tuple(KindCost(k, values[k], {FEW: next(found), MANY: next(found)}) for k in values)
        bound = default if max_kl is None else max_kl
        within = next(text_run.within(kinds, bound), None)
    recipe = Recipe(usual | rows, default)
    count = sum(map(len, parts))
    return KindCosts(str(checkpoint), count, format.block_size, kinds, recipe, within)


def recipes(kinds: Sequence[KindCost], bound: float) -> Iterator[dict[str, int]]:
    """Yield bits of every kind: from those whose costs add up to the bound, to 8 bits everywhere.

    Each step gives 8 bits to the kind that gains most nats for its bytes.
    """
    bits = dict.fromkeys((each.kind for each in kinds), FEW)
    order = sorted(kinds, key=lambda k: (k.nats[FEW] - k.nats[MANY]) / k.values, reverse=True)
    total = sum(each.nats[FEW] for each in kinds)
    for each in order:
        if total <= bound:
            yield dict(bits)
        bits[each.kind] = MANY
        total += each.nats[MANY] - each.nats[FEW]
    yield dict(bits)


def _values(source: Checkpoint) -> dict[str, int]:
    """Return kind -> number of its values, in the order of a report."""
    config = source.config
    found = dict.fromkeys((k for k in MATRIX_KINDS if k in kinds_of(config)), 0)
    for name, shape in config.backbone_shapes().items():
        if len(shape) == 2 and kind_of(name) in found:  # others are always floats
            found[kind_of(name)] += shape[0] * shape[1]
    found["head"] = found["embedding"]
    return found | ({ROWS: config.table_parameters} if config.stem_layers else {})


class _Stored:
    """A matrix as quantization leaves it. Pieces of it are quantized when they are read first."""

    def __init__(self, matrix: Matrix, bits: int, block: int) -> None:
        self._matrix, self._bits = matrix, bits
        self._block = fitting_block(matrix.shape[1], block)
        self._made: dict[tuple[int, int], Blocks] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self._matrix.shape

    def rows(self, start: int, stop: int) -> F32:
        if not self._block:  # an export leaves such a matrix as it is
            return self._matrix.rows(start, stop)
        if (start, stop) not in self._made:
            rows = self._matrix.rows(start, stop)
            self._made[start, stop] = search_blocks(rows, self._bits, self._block)
        codes, scales, _ = self._made[start, stop]
        return dequantize_blocks(codes, scales, self._bits)


class _Text:
    """Sequences of a text, to be computed with kinds of tensors quantized."""

    def __init__(
        self, source: Checkpoint, ids: Sequence[Sequence[int]], block: int, bar: Progress
    ) -> None:
        self._source, self._ids, self._block, self._bar = source, ids, block, bar
        self._config = source.config
        self._used = np.unique(np.concatenate(ids))
        self._index = np.full(self._config.vocab_size, len(self._used), np.int32)
        self._index[self._used] = np.arange(len(self._used), dtype=np.int32)
        self._embedding = self._gathered(source.backbone["embedding"])

    def within(self, kinds: Sequence[KindCost], bound: float) -> Iterator[Recipe]:
        """Yield those recipes whose divergence, all kinds together, is not above the bound."""
        for bits in recipes(kinds, bound):
            self._bar.describe("measuring all kinds together")
            (nats,) = self.divergences([bits])
            if nats <= bound:
                yield Recipe(bits, nats)

    def divergences(self, settings: Sequence[Bits]) -> list[float]:
        """Return the mean divergence of each setting, in nats. Each layer is read once for all."""
        every: list[Bits] = [{}, *settings]
        runs = [[self._begin(bits, ids) for ids in self._ids] for bits in every]
        for layer in range(self._config.n_layers):
            self._bar.describe(f"layer {layer} of {self._config.n_layers}")
            self._advance(layer, every, runs)
        self._bar.describe("comparing logits")
        heads = [self._head(bits) for bits in every]
        sums = np.zeros(len(settings))
        step = max(1, LOGITS_NBYTES // (4 * self._config.vocab_size))
        for number, ids in enumerate(self._ids):
            for at in range(0, len(ids), step):
                pieces = (
                    head_forward(self._config, head, run[number][1][at : at + step])
                    for head, run in zip(heads, runs, strict=True)
                )
                expected = next(pieces)
                sums += [divergence(expected, found).sum() for found in pieces]
        return [float(total) / sum(map(len, self._ids)) for total in sums]

    def _begin(self, bits: Bits, ids: Sequence[int]) -> tuple[Tokens, F32]:
        embedding = self._picked(self._embedding, bits.get("embedding"), self._block)
        backbone = {**self._source.backbone, "embedding": embedding}
        backbone |= self._of_streams("altup_in", bits)
        return Tokens(self._config, backbone, ids), embed(self._config, backbone, ids)

    def _head(self, bits: Bits) -> dict[str, Matrix]:
        backbone = {**self._source.backbone, **self._of_streams("altup_out", bits)}
        name = "embedding" if self._config.tied_head else "head"
        if "head" in bits:
            backbone[name] = _Stored(backbone[name], bits["head"], self._block)
        return backbone

    def _of_streams(self, kind: str, bits: Bits) -> dict[str, Matrix]:
        """Return the matrices of a kind between streams and embedding or head, with these bits."""
        names = [name for name in self._config.backbone_shapes() if name.endswith(f".{kind}")]
        exact = {name: self._source.backbone[name] for name in names if kind in bits}
        return {name: _Stored(matrix, bits[kind], self._block) for name, matrix in exact.items()}

    def _gathered(self, matrix: Matrix) -> F32:
        """Read the rows of the text's tokens."""
        return np.concatenate([matrix.rows(at, at + 1) for at in self._used.tolist()])

    def _picked(self, rows: F32, bits: int | None, block: int) -> Matrix:
        """Return gathered rows as a matrix by token, with these bits; no other row can be read."""
        matrix: Matrix = ArrayMatrix(rows)
        if bits is not None:
            matrix = ArrayMatrix(whole(_Stored(matrix, bits, block)))
        return IndexedMatrix(matrix, self._index)

    def _advance(
        self, layer: int, settings: Sequence[Bits], runs: list[list[tuple[Tokens, F32]]]
    ) -> None:
        """Run all sequences of all settings through a layer."""
        names = [f"layers.{layer}.{name}" for name in self._config.layer_shapes(layer)]
        exact = {name: ArrayMatrix(whole(self._source.backbone[name])) for name in names}
        made: dict[tuple[str, int], Matrix] = {}

        def weight(name: str, bits: int | None) -> Matrix:
            if bits is None or len(exact[name].shape) < 2:
                return exact[name]
            if (name, bits) not in made:
                made[name, bits] = ArrayMatrix(whole(_Stored(exact[name], bits, self._block)))
            return made[name, bits]

        tables: dict[int | None, Mapping[int, Matrix]] = {None: {}, FEW: {}, MANY: {}}
        if layer in self._source.rows:
            rows = self._gathered(self._source.rows[layer])
            tables = {
                bits: {layer: self._picked(rows, bits, GROUPS.get(bits or 0, 0))} for bits in tables
            }
        for bits, run in zip(settings, runs, strict=True):
            weights = {name: weight(name, bits.get(kind_of(name))) for name in names}
            for number, (tokens, x) in enumerate(run):
                x = layer_forward(self._config, layer, weights, tables[bits.get(ROWS)], x, tokens)
                run[number] = tokens, x
