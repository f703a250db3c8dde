"""How much each input channel of a matrix counts: its mean square over a calibration text.

ggml calls such vectors an importance matrix: its quantizers then lose least where inputs are large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoint import Checkpoint
from stem_edge.export.gptq import DAMPING
from stem_edge.export.hidden_states import HiddenStates
from stem_edge.quantize import F32

# Matrix -> the input that stem_edge.reference shows for it; others are shown by their own name.
INPUTS = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "up": "gate"}
HEAD = "head"


class MeanSquares:
    """An Observer: the mean square of each channel, over all positions that it is shown."""

    def __init__(self) -> None:
        self._sums: dict[str, F32] = {}  # input -> [K]
        self._positions: dict[str, int] = {}

    def see(self, name: str, x: F32) -> None:
        """Account for the input `name`, x [T, K]."""
        squares = np.einsum("tk,tk->k", x, x)
        self._sums[name] = self._sums[name] + squares if name in self._sums else squares
        self._positions[name] = self._positions.get(name, 0) + len(x)

    def importance(self, name: str) -> F32:
        """[K], all positive. ggml loses a block of weights whose channels all count nothing, so a
        share of the mean is added: what the text never had is not impossible."""
        mean = self._sums[name] / np.float32(self._positions[name])
        return np.asarray(mean + DAMPING * (mean.mean() or 1), np.float32)


def importance_vectors(
    source: Checkpoint,
    sequences: Sequence[Sequence[int]],
    tell: Callable[[str], object] = lambda what: None,
) -> dict[str, F32]:
    """Matrix of the backbone -> importance of its input channels [width], float32, positive.

    All matrices of ModelConfig.backbone_shapes(), but an embedding only where it is the head, too.
    sequences: token ids. They go through the checkpoint in float32, in the memory of one layer and
    of their hidden states.
    """
    config, seen = source.config, MeanSquares()
    states = HiddenStates(source, sequences)
    while states.layer < config.n_layers:
        tell(f"looking into layer {states.layer}")
        states.observe(seen.see)
        tell(f"running the text through layer {states.layer}")
        states.advance({})
    states.observe_head(seen.see)
    return {name: seen.importance(observed) for name, observed in _inputs(config).items()}


def _inputs(config: ModelConfig) -> dict[str, str]:
    """Matrix of the backbone -> what its input is called."""
    found = {}
    for name, shape in config.backbone_shapes().items():
        at, _, part = name.rpartition(".")
        if len(shape) < 2 or (part == "embedding" and not config.tied_head):
            continue
        found[name] = f"{at}.{INPUTS.get(part, part)}" if at else HEAD
    return found
