"""What the exporter needs of a trained checkpoint, whichever trainer wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.quantize import F32
from stem_edge.reference import IndexedMatrix, Matrix


class SourceMatrix(Matrix, Protocol):
    """A matrix of a checkpoint: rows as float32, and the bytes it takes there."""

    nbytes: int


@dataclass(frozen=True)
class TokenizerSource:
    """Which tokenizer the model was trained with, as its trainer names it."""

    kind: str
    path: Path | None
    add_bos: bool | None  # None: as its file says


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint by canonical names, its tensors not read yet.

    backbone has the names and shapes of ModelConfig.backbone_shapes(); tables maps each STEM layer
    to its [records, row width] table (ModelConfig.records, row_parts).
    """

    path: Path
    config: ModelConfig  # bos_id and eos_ids are the tokenizer's to fill in
    backbone: Mapping[str, SourceMatrix]
    tables: Mapping[int, SourceMatrix]
    tokenizer: TokenizerSource
    notes: tuple[str, ...] = ()  # what the user should know, a sentence each
    index: npt.NDArray[np.int32] | None = None  # token -> record [V], where tokens share records
    # The trainer's name of a module -> this project's name of its matrix; LoRA adapters use the first.
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> Mapping[int, Matrix]:
        """STEM layer -> a row a token [vocab_size, row width], as stem_edge.reference takes them."""
        if self.index is None:
            return self.tables
        return {layer: IndexedMatrix(table, self.index) for layer, table in self.tables.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as the checkpoint stores them."""
        matrices = [*self.backbone.values(), *self.tables.values()]
        return sum(matrix.nbytes for matrix in matrices)


def check_shapes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, if every tensor is there with the shape that its config asks for."""
    config = checkpoint.config
    expected: dict[str, tuple[int, ...]] = dict(config.backbone_shapes())
    table = (config.records, config.record_values // max(1, len(config.stem_layers)))
    expected |= {f"table of layer {l}": table for l in config.stem_layers}
    found = {name: matrix.shape for name, matrix in checkpoint.backbone.items()}
    found |= {f"table of layer {l}": table.shape for l, table in checkpoint.tables.items()}
    wrong = [
        f"{name} is {list(found[name]) if name in found else 'missing'}, expected {list(shape)}"
        for name, shape in expected.items()
        if found.get(name) != shape
    ]
    wrong += [f"{name} is not part of such a model" for name in sorted(found.keys() - expected)]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{checkpoint.path}: tensors and configuration disagree: {'; '.join(wrong[:3])}{more}; "
            "check that all files are of the same run and step"
        )
    _check_index(checkpoint)
    return checkpoint


def _check_index(checkpoint: Checkpoint) -> None:
    config, index = checkpoint.config, checkpoint.index
    shared = config.records != config.vocab_size or config.stem_ffn == "hash-moe"
    if (index is not None) != shared:
        raise CheckpointError(
            f"{checkpoint.path}: {'no' if index is None else 'a'} map from tokens to experts in a "
            f"{config.stem_ffn} model"
        )
    if index is None:
        return
    if index.shape != (config.vocab_size,) or index.min() < 0 or index.max() >= config.records:
        raise CheckpointError(
            f"{checkpoint.path}: the map from tokens to experts is {list(index.shape)} with values "
            f"{index.min()} to {index.max()}; expected [{config.vocab_size}], 0 to "
            f"{config.records - 1}"
        )


def check_finite(name: str, start: int, values: F32) -> F32:
    """`values`, rows of the matrix `name` from row `start` on, if all of them are finite."""
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(np.argwhere(bad)[0][0]) + start
        raise CheckpointError(
            f"{name}: {int(bad.sum())} NaN or infinite values, the first in row {row}; "
            "training diverged or the file is damaged: export an earlier step"
        )
    return values
