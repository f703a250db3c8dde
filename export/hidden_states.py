"""Sequences of a calibration text on their way through the model, in the memory of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stem_edge.export.checkpoint import Checkpoint
from stem_edge.quantize import F32
from stem_edge.reference import (
    ArrayMatrix,
    Matrix,
    Observer,
    embed,
    head_forward,
    layer_forward,
    whole,
)
from stem_edge.rope import rope_tables


class HiddenStates:
    """Hidden states [T, dim] of every sequence before the layer `layer`."""

    def __init__(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> None:
        self.layer = 0
        self._checkpoint, self._sequences = checkpoint, sequences
        self._states = [embed(checkpoint.backbone, ids) for ids in sequences]
        self._weights: dict[str, Matrix] = {}
        config = checkpoint.config
        self._rope = rope_tables(config, max(map(len, sequences), default=0))

    def observe(self, see: Observer) -> None:
        """Show what goes into the matrices of this layer; the states stay where they are."""
        for number in range(len(self._states)):
            self._forward(number, self._layer_weights(), see)

    def advance(self, stored: Mapping[str, F32]) -> None:
        """Go through this layer, with the matrices in `stored` in place of the checkpoint's."""
        weights = self._layer_weights() | {n: ArrayMatrix(array) for n, array in stored.items()}
        for number in range(len(self._states)):
            self._states[number] = self._forward(number, weights, lambda name, x: None)
        self.layer += 1
        self._weights = {}

    def observe_head(self, see: Observer) -> None:
        """Show what goes into the head, after the last layer."""
        backbone, config = self._checkpoint.backbone, self._checkpoint.config
        # The logits themselves are not wanted: one row of the head will do.
        row = ArrayMatrix(np.zeros((1, config.dim), np.float32))
        bias = ArrayMatrix(np.zeros(1, np.float32))
        short: dict[str, Matrix] = {
            "norm": backbone["norm"],
            "embedding": row,
            "head": row,
            "head.bias": bias,
        }
        for x in self._states:
            head_forward(config, short, x, see)

    def _layer_weights(self) -> dict[str, Matrix]:
        """This layer's tensors, read once for all sequences."""
        if not self._weights:
            at = f"layers.{self.layer}."
            names = [at + name for name in self._checkpoint.config.layer_shapes(self.layer)]
            read = {name: whole(self._checkpoint.backbone[name]) for name in names}
            self._weights = {name: ArrayMatrix(array) for name, array in read.items()}
        return self._weights

    def _forward(self, number: int, weights: Mapping[str, Matrix], see: Observer) -> F32:
        ids, x = self._sequences[number], self._states[number]
        cos, sin = (table[: len(ids)] for table in self._rope)
        return layer_forward(
            self._checkpoint.config,
            self.layer,
            weights,
            self._checkpoint.rows,
            x,
            ids,
            cos,
            sin,
            see,
        )
