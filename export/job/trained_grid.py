"""Weights that training left on a grid of 4 bits, and the options of an export that keep them.

Such checkpoints hold weights in wider types, as multiples of a scale that a block of values shares.
Stored in blocks of the same size, they are as they were trained; other blocks lose what the training
was for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np

from stem_edge.bundle.expected import kinds_of
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.tensor_files.packed_tensor import Scaled
from stem_edge.graph.formats import MATRIX_KINDS, SMALL_KINDS, BackboneFormat, MatrixKind
from stem_edge.graph.layer import kind_of
from stem_edge.numerics.block_search import grid_scales
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import cut, extremes

BLOCKS = (128, 64, 32, 16)
ROWS = 8  # of a matrix, from all over it
LAYERS = 3  # that are looked at: the first, the last, and one between
ENOUGH = 0.99  # of the blocks, because values of a few may have been clipped


def keep_trained_grid(
    source: Checkpoint, options: ExportOptions
) -> tuple[Checkpoint, ExportOptions]:
    """Choose what keeps weights that were trained for 4 bits, where nothing else is asked for.

    Matrices get blocks of the size in training, and 4 bits; so do the rows of tables. Notes of the
    checkpoint say so, or that what was asked for loses what the training was for.
    """
    said: list[str] = []
    four = isinstance(options.format, BackboneFormat) and options.format.weights == "int4"
    if four and options.stored is None:
        options, said = _matrices(trained_kinds(source), kinds_of(source.config), options)
    stem = source.config.stem_layers and not source.config.n_experts
    kept = any(isinstance(table, Scaled) for table in source.tables.values())
    if stem and options.tables in (None, "int4") and not kept:
        block = min(map(_block, _some(source.tables.values())))
        options, more = _rows(block, options)
        said += more
    return replace(source, notes=(*source.notes, *said)), options


def trained_kinds(source: Checkpoint) -> dict[MatrixKind, int]:
    """Return the kinds of matrices with values on a grid of 4 bits: kind -> size of its blocks.

    Reads some rows of some layers. Matrices that an adapter changed lie on no grid.
    """
    matrices: dict[str, list[Matrix]] = {}
    for name, shape in source.config.backbone_shapes().items():
        if len(shape) == 2:
            matrices.setdefault(name.rpartition(".")[2], []).append(source.backbone[name])
    blocks: dict[MatrixKind, list[int]] = {}
    for part, alike in matrices.items():
        blocks.setdefault(kind_of(part), []).extend(map(_block, _some(alike)))
    if source.config.tied_head:
        blocks["head"] = blocks["embedding"]
    return {kind: min(blocks[kind]) for kind in MATRIX_KINDS if min(blocks.get(kind, [0]))}


def _matrices(
    found: dict[MatrixKind, int], kinds: set[MatrixKind], options: ExportOptions
) -> tuple[ExportOptions, list[str]]:
    small: dict[MatrixKind, int] = {kind: 4 for kind in SMALL_KINDS if kind in found}
    wanted = replace(options, bits=small | dict(options.bits or {}))
    format = cast(BackboneFormat, wanted.format)
    kept = [kind for kind in found if format.bits(kind) == 4]
    if not kept:
        return options, []
    block, asked = min(found[kind] for kind in kept), options.block_size
    said = f"{', '.join(kept)} were trained for 4 bits in blocks of {block}"
    if asked is not None and block % asked:
        return options, [f"{said}, which blocks of {asked} lose; leave out --block-size"]
    # Given, so that nothing else is chosen for them.
    bits = dict(options.bits or {}) | dict.fromkeys(kept, 4)
    every = kept == list(found) and found.keys() >= kinds - {"v"}
    zeros = options.asymmetric if options.asymmetric is not None or not every else False
    wanted = replace(wanted, block_size=asked or block, bits=bits, asymmetric=zeros)
    return wanted, [f"{said} and are kept as trained"]


def _rows(block: int, options: ExportOptions) -> tuple[ExportOptions, list[str]]:
    if not block:
        return options, []
    said, asked = f"rows were trained for 4 bits in groups of {block}", options.group_size
    if asked is not None and block % asked:
        return options, [f"{said}, which groups of {asked} lose; leave out --group-size"]
    options = replace(options, tables="int4", group_size=asked or block)
    return options, [f"{said} and are kept as trained"]


def _some(matrices: Iterable[Matrix]) -> list[Matrix]:
    """Return the matrices of a few layers, from the first to the last."""
    found = list(matrices)
    return [
        found[at] for at in sorted({n * (len(found) - 1) // (LAYERS - 1) for n in range(LAYERS)})
    ]


def _block(matrix: Matrix) -> int:
    """Return the greatest block size that puts all values on a grid; 0 if there is none."""
    count, width = matrix.shape
    starts = range(0, count, max(1, count // ROWS))[:ROWS]
    rows: F32 = np.concatenate([matrix.rows(at, at + 1) for at in starts])
    finite = np.isfinite(rows).all()  # others are refused, by their name, when the model is run
    for block in BLOCKS:
        if finite and width % block == 0:
            blocks = cut(rows, block)
            used = extremes(blocks) != 0
            if used.any() and (grid_scales(blocks)[used] != 0).mean() >= ENOUGH:
                return block
    return 0
