"""Running a calibration text through the model, in the memory of one layer.

The mean square of an input channel says how much its weights count. ggml calls vectors of these an
importance matrix; its quantizers then lose least where inputs are large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.quantization.exact_model import next_states
from stem_edge.numerics.arithmetic import Observer
from stem_edge.numerics.matrix import ArrayMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import Tokens, embed, head_forward

# Matrix -> its input in stem_edge.numerics.reference; inputs of others have the matrix's own name.
INPUTS = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "up": "gate"}
HEAD = "head"
DAMPING = 0.01  # share of the mean that each channel counts at least


class HiddenStates:
    """Hidden states [T, hidden_width] of all sequences, before the layer `layer`."""

    def __init__(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> None:
        self.layer = 0
        self._checkpoint = checkpoint
        described = checkpoint.config, checkpoint.backbone
        self._tokens = [Tokens(*described, ids) for ids in sequences]
        self._states = [embed(*described, ids) for ids in sequences]

    def advance(self, see: Observer) -> None:
        """Run the states through this layer, and show the inputs of its matrices to `see`."""
        at = f"layers.{self.layer}."
        names = [at + name for name in self._checkpoint.config.layer_shapes(self.layer)]
        weights = {name: ArrayMatrix(whole(self._checkpoint.backbone[name])) for name in names}
        for number, (x, tokens) in enumerate(zip(self._states, self._tokens, strict=True)):
            self._states[number] = next_states(
                self._checkpoint, self.layer, weights, x, tokens, see
            )
        self.layer += 1

    def observe_head(self, see: Observer) -> None:
        """Show the inputs of the head, and of matrices before it, to `see`, after the last layer."""
        backbone, config = self._checkpoint.backbone, self._checkpoint.config
        # A head of one row saves computing logits, which are not used.
        row = ArrayMatrix(np.zeros((1, config.dim), np.float32))
        bias = ArrayMatrix(np.zeros(1, np.float32))
        short: dict[str, Matrix] = {
            "norm": backbone["norm"],
            "embedding": row,
            "head": row,
            "head.bias": bias,
        }
        ends = [name for name in config.backbone_shapes() if name.endswith(".altup_out")]
        short |= {name: backbone[name] for name in ends}
        for x in self._states:
            head_forward(config, short, x, see)
        self.layer += 1


def squares(x: F32) -> F32:
    """Return the sum of squares of each channel [K] over the positions of x [T, K]."""
    return np.asarray(np.einsum("tk,tk->k", x, x), np.float32)


def damped(squares: F32) -> F32:
    """Return the importance [K] of channels by their squares, all positive. A share of the mean is
    added, because a text lacks some inputs, and ggml loses blocks if all their channels count 0."""
    return np.asarray(squares + DAMPING * (squares.mean() or 1), np.float32)


def importance_vectors(
    source: Checkpoint,
    sequences: Sequence[Sequence[int]],
    layer_done: Callable[[], object] = lambda: None,
) -> dict[str, F32]:
    """Return matrix of the backbone -> importance of its input channels [width], float32, positive.

    It has all matrices of ModelConfig.backbone_shapes(), but an embedding only where it is also the
    head. sequences: token ids, which run through the checkpoint in float32. Takes the memory of one
    layer and of the hidden states.
    """
    config, sums = source.config, dict[str, F32]()

    def see(name: str, x: F32) -> None:
        sums[name] = sums[name] + squares(x) if name in sums else squares(x)

    states = HiddenStates(source, sequences)
    while states.layer < config.n_layers:
        states.advance(see)
        layer_done()
    states.observe_head(see)
    positions = np.float32(sum(map(len, sequences)))
    return {name: damped(sums[seen] / positions) for name, seen in _inputs(config).items()}


def _inputs(config: ModelConfig) -> dict[str, str]:
    """Map each matrix of the backbone to the name of its input."""
    found = {}
    for name, shape in config.backbone_shapes().items():
        at, _, part = name.rpartition(".")
        if len(shape) < 2 or (part == "embedding" and not config.tied_head):
            continue
        found[name] = f"{at}.{INPUTS.get(part, part)}" if at else HEAD
    return found
