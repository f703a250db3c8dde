"""What the exporter needs of a trained checkpoint, whichever trainer wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.quantize import F32
from stem_edge.reference import Matrix


class SourceMatrix(Matrix, Protocol):
    """A matrix of a checkpoint: rows as float32, and the bytes it takes there."""

    nbytes: int


@dataclass(frozen=True)
class TokenizerSource:
    """Which tokenizer the model was trained with, as its trainer names it."""

    kind: str
    path: Path | None
    add_bos: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint by canonical names, its tensors not read yet.

    backbone has the names and shapes of ModelConfig.backbone_shapes(); tables maps each STEM layer
    to its [vocab_size, d_ff] table.
    """

    path: Path
    config: ModelConfig  # bos_id and eos_ids are the tokenizer's to fill in
    backbone: Mapping[str, SourceMatrix]
    tables: Mapping[int, SourceMatrix]
    tokenizer: TokenizerSource
    notes: tuple[str, ...] = ()  # what the user should know, a sentence each

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as the checkpoint stores them."""
        matrices = [*self.backbone.values(), *self.tables.values()]
        return sum(matrix.nbytes for matrix in matrices)


def check_shapes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, if every tensor is there with the shape that its config asks for."""
    config = checkpoint.config
    expected: dict[str, tuple[int, ...]] = dict(config.backbone_shapes())
    expected |= {
        f"table of layer {l}": (config.vocab_size, config.d_ff) for l in config.stem_layers
    }
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
            f"{checkpoint.path}: tensors and params.json disagree: {'; '.join(wrong[:3])}{more}; "
            "check that all files are of the same run and step"
        )
    return checkpoint


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
