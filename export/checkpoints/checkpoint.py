"""Defines Checkpoint, one description for checkpoints of all file formats, and checks their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import some
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.numerics.arithmetic import READ_ROWS
from stem_edge.numerics.matrix import IndexedMatrix, Matrix
from stem_edge.numerics.quantize import F32
from stem_edge.sampling import Sampling

PIECE_VALUES = 1 << 16  # read at a time when looking for zeros


@dataclass(frozen=True)
class TokenizerSource:
    """Where the model's tokenizer is, and its kind ("json", "gguf" or "bytes")."""

    kind: str
    path: Path | None
    add_bos: bool | None  # whether BOS comes before each text; None: as the file says


@dataclass(frozen=True)
class Checkpoint:
    """Opened checkpoint: config, lazy tensors by this project's names, and the tokenizer's source.

    backbone: tensors with the names and shapes of ModelConfig.backbone_shapes(). tables: index of a
    STEM layer -> its table [records, row width]. Several tokens may share a record.
    """

    path: Path
    config: ModelConfig  # bos_id and eos_ids are set later, from the tokenizer
    backbone: Mapping[str, Tensor]
    tables: Mapping[int, Tensor]
    tokenizer: TokenizerSource
    notes: tuple[str, ...] = ()  # sentences for the user
    index: npt.NDArray[np.int32] | None = None  # token -> record [V], where tokens share records
    sampling: Sampling | None = None  # recommended by the model's makers
    # Trainer's name of a module -> this project's name of its matrix; needed for LoRA adapters.
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> Mapping[int, Matrix]:
        """Index of a STEM layer -> its table with one row per token [vocab_size, row width]."""
        if self.index is None:
            return self.tables
        return {layer: IndexedMatrix(table, self.index) for layer, table in self.tables.items()}


def module_names(
    inside: str, layers: int, top: Mapping[str, str], parts: Mapping[str, str]
) -> dict[str, str]:
    """Return a dict from the trainer's name of each module to this project's name of its weight.

    inside: the trainer's prefix of names in a layer, such as "layers.{}.". top: the trainer's name
    -> ours, outside the layers. parts: the same for names in a layer, without prefix.
    """
    return dict(top) | {
        inside.format(layer) + theirs: f"layers.{layer}.{ours}"
        for layer in range(layers)
        for theirs, ours in parts.items()
    }


def check_shapes(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. Raises CheckpointError if its tensors do not fit its config."""
    config = checkpoint.config
    expected: dict[str, tuple[int, ...]] = dict(config.backbone_shapes())
    table = (config.records, config.record_values // max(1, len(config.row_layers)))
    expected |= {f"table of layer {l}": table for l in config.row_layers}
    found = {name: matrix.shape for name, matrix in checkpoint.backbone.items()}
    found |= {f"table of layer {l}": table.shape for l, table in checkpoint.tables.items()}
    wrong = [
        f"{name} is {list(found[name]) if name in found else 'missing'}, expected {list(shape)}"
        for name, shape in expected.items()
        if found.get(name) != shape
    ]
    wrong += [f"{n} is not part of such a model" for n in sorted(found.keys() - expected)]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path}: tensors and configuration disagree: {some(wrong, 160)}; check that "
            "all files are from the same run and step"
        )
    return checkpoint


def check_finite(name: str, start: int, values: F32) -> F32:
    """Return `values`, rows of tensor `name` from row `start`. Raises CheckpointError for NaN or inf."""
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(np.argwhere(bad)[0][0]) + start
        raise CheckpointError(
            f"{name}: {int(bad.sum())} NaN or infinite values, the first in row {row}; "
            "training diverged or the file is damaged: export an earlier step"
        )
    return values


def same_values(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.shape:
        return False
    starts = range(0, other.shape[0], READ_ROWS)
    return all(
        np.array_equal(one.rows(at, at + READ_ROWS), other.rows(at, at + READ_ROWS))
        for at in starts
    )


def note_zero_tables(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a note for the user about each table that is all zeros.

    Such tables are exported, because tables of stem-plus may start as zeros. But a table may also be all
    zeros because it was not saved, or because the file has a hole.
    """
    notes = [
        f"the table of layer {layer} is all zeros: check that the checkpoint is complete"
        for layer, table in checkpoint.tables.items()
        if is_zero(table)
    ]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes))


def is_zero(matrix: Tensor) -> bool:
    step = max(1, PIECE_VALUES // max(1, prod(matrix.shape[1:])))
    return not any(matrix.rows(at, at + step).any() for at in range(0, matrix.shape[0], step))
