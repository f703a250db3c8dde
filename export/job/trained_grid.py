"""Detects weights that were trained for 4 bits (QAT), and stores them without loss.

Such a checkpoint stores floats, but all values of a block are multiples of one scale. With blocks of the
same size, 4 bits store these values exactly. Other block sizes would round them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.plan import Plan, kinds_of
from stem_edge.export.job.table_plan import RowStorage
from stem_edge.graph.formats import (
    MATRIX_KINDS,
    SMALL_KINDS,
    MatrixKind,
    WeightType,
)
from stem_edge.graph.layer import kind_of
from stem_edge.numerics.block_search import grid_scales
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import cut, extremes

BLOCKS = (128, 64, 32, 16)
ROWS = 8  # rows to read, spread over a matrix
ENOUGH = 0.99  # share of blocks that must fit; the other blocks may have clipped values


def keep_trained_grid(plan: Plan) -> Plan:
    """Return a plan that stores weights trained for 4 bits exactly, if the recipe allows 4 bits.

    Such matrices and table rows get 4 bits, in blocks of the size used in training. A note tells the user.
    """
    said, source, recipe = list[str](), plan.source, plan.recipe
    chosen = recipe.type is None or isinstance(recipe.type, str)
    four = chosen and plan.format.weights == "int4" and not plan.own_types
    if four and (found := trained_kinds(source)):
        block = min(found.values())
        kinds = f"{', '.join(found)} were trained for 4 bits in blocks of {block}"
        said.append(f"{kinds} and are kept as trained")
        every = found.keys() >= kinds_of(source.config) - {"v"}
        small: dict[MatrixKind, WeightType] = {k: "int4" for k in found if k in SMALL_KINDS}
        format = msgspec.structs.replace(
            plan.format, block_size=block, kinds=small, asymmetric=not every
        )
        fixed = {*found, "v"} if "qkv" in found else {*found}
        plan = replace(plan, format=format, fixed=plan.fixed.union(fixed))
    stem = source.config.stem_layers and not source.config.n_experts
    kept = any(table.codes is not None for table in source.tables.values())
    tables = source.tables.values() if stem and recipe.rows in (None, "int4") and not kept else ()
    if block := min(map(_block, _first_middle_last(tables)), default=0):
        said.append(f"rows were trained for 4 bits in groups of {block} and are kept as trained")
        plan = replace(plan, rows=RowStorage("int4", block))
    return replace(plan, source=replace(source, notes=(*source.notes, *said)))


def trained_kinds(source: Checkpoint) -> dict[MatrixKind, int]:
    """Detect the kinds of matrices that were trained for 4 bits; return kind -> values per block.

    Reads only some rows of three layers. Matrices that an adapter changed do not count as trained for 4 bits.
    """
    matrices: dict[str, list[Matrix]] = {}
    for name, shape in source.config.backbone_shapes().items():
        if len(shape) == 2:
            matrices.setdefault(name.rpartition(".")[2], []).append(source.backbone[name])
    blocks: dict[MatrixKind, list[int]] = {}
    for part, alike in matrices.items():
        blocks.setdefault(kind_of(part), []).extend(map(_block, _first_middle_last(alike)))
    if source.config.tied_head:
        blocks["head"] = blocks["embedding"]
    return {kind: min(blocks[kind]) for kind in MATRIX_KINDS if min(blocks.get(kind, [0]))}


def _first_middle_last(matrices: Iterable[Matrix]) -> list[Matrix]:
    last = len(found := list(matrices)) - 1
    return [found[at] for at in sorted({0, last // 2, last}) if found]


def _block(matrix: Matrix) -> int:
    """Return the largest block size for which a matrix looks trained for 4 bits; 0 if none."""
    count, width = matrix.shape
    starts = range(0, count, max(1, count // ROWS))[:ROWS]
    rows: F32 = np.concatenate([matrix.rows(at, at + 1) for at in starts])
    finite = np.isfinite(rows).all()  # NaN and inf are reported later, with the tensor's name
    for block in BLOCKS:
        if finite and width % block == 0:
            blocks = cut(rows, block)
            used = extremes(blocks) != 0
            if used.any() and (grid_scales(blocks)[used] != 0).mean() >= ENOUGH:
                return block
    return 0
