"""Computes the checkpoint's layers and logits in float32, and refuses broken checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import Checkpoint, check_finite, is_zero
from stem_edge.numerics.arithmetic import READ_ROWS, Observer, mean_square, pick
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import Tokens, head_forward, layer_forward

TOO_LARGE = (
    "too large for float32, so training diverged or a scale is wrong: export an earlier step"
)


def next_states(
    source: Checkpoint,
    layer: int,
    weights: Mapping[str, Matrix],
    x: F32,
    tokens: Tokens,
    observe: Observer = lambda name, x: None,
) -> F32:
    """Return the hidden states after a layer. Raises CheckpointError if they are not finite.

    x: hidden states before it; weights: its tensors; tokens: ids, RoPE tables, and keys and values of layers;
    observe: is called with the name and values of each matrix input.
    """
    with np.errstate(all="ignore"):  # no warnings, since the result is checked
        found = layer_forward(source.config, layer, weights, source.rows, x, tokens, observe)
        finite = np.isfinite(mean_square(found)).all()  # as the next norm computes it
    if not finite:
        at = f"layers.{layer}."
        _check_tensors(source, ["embedding", *(at + n for n in source.config.layer_shapes(layer))])
        if layer in source.rows:
            check_finite(f"table of layer {layer}", 0, pick(source.rows[layer], tokens.row_ids))
        raise CheckpointError(
            f"{source.path}: layer {layer} computes NaN or infinite values from finite weights, which "
            f"are {TOO_LARGE}"
        )
    return found


def exact_logits(source: Checkpoint, x: F32) -> F32:
    """Return logits [T, V] of the last layer's output x.

    Raises CheckpointError if logits are not finite or all equal.
    """
    with np.errstate(all="ignore"):
        logits = head_forward(source.config, source.backbone, x)
    ends = [name for name in source.backbone if not name.startswith("layers.")]
    if not np.isfinite(logits).all():
        _check_tensors(source, ends)
        raise CheckpointError(
            f"{source.path}: the head computes NaN or infinite logits from finite weights, which are "
            f"{TOO_LARGE}"
        )
    if source.config.vocab_size > 1 and (logits.max(axis=1) == logits.min(axis=1)).all():
        zeros = [name for name in ends if is_zero(source.backbone[name])]
        why = f"{', '.join(zeros)} is all zeros" if zeros else "its weights are constant"
        raise CheckpointError(
            f"{source.path}: all logits are equal, so the model says nothing ({why}); check that the "
            "checkpoint is complete and trained"
        )
    return logits


def _check_tensors(source: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError if a tensor has values that are not finite; the error names the tensor."""
    for name in names:
        matrix = source.backbone[name]
        for start in range(0, matrix.shape[0], READ_ROWS):
            check_finite(name, start, matrix.rows(start, start + READ_ROWS))
