"""Runs a calibration text through the checkpoint, with only one layer in memory at a time.

Mean squares of input channels are their importance: ggml's quantizers round the weights of important
channels most exactly. llama.cpp calls all these vectors of a model an importance matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.quantization.exact_model import next_states
from stem_edge.export.quantization.streams import in_order
from stem_edge.graph.layer import kind_of
from stem_edge.numerics.arithmetic import Observer
from stem_edge.numerics.matrix import ArrayMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import Tokens, embed, head_forward
from stem_edge.system.memory import return_freed_memory

HEAD = "head"
INPUT_VALUES = 1 << 23  # values of the widest matrix input that are in memory at once
DAMPING = 0.01  # share of the mean importance that is added to each channel


class HiddenStates:
    """Hidden states [T, hidden_width] of several sequences, before layer `layer` (an index)."""

    def __init__(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], threads: int = 1
    ) -> None:
        self.layer = 0
        self._checkpoint, self.threads = checkpoint, threads
        described = checkpoint.config, checkpoint.backbone
        # One item per sequence. A sequence that is removed from both lists is not run further.
        self.tokens = [Tokens(*described, ids) for ids in sequences]
        self.states = [embed(*described, ids) for ids in sequences]

    def advance(self, see: Observer | None = None) -> None:
        """Run the states through the next layer; after the last layer, through the head.

        see: is called with the name and values of each matrix input, for several sequences at once. Calls
        come from any thread, but not two at once for the same name.
        """
        source, layer = self._checkpoint, self.layer
        self.layer += 1
        last = layer == source.config.n_layers
        weights = _ends(source) if last else layer_weights(source, layer)

        def run(sequence: int) -> tuple[F32, list[tuple[str, F32]]]:
            inputs = list[tuple[str, F32]]()
            observe: Observer = lambda name, x: inputs.append((name, x)) if see else None
            x = self.states[sequence]
            if last:
                head_forward(source.config, weights, x, observe)
                return x, inputs
            tokens = self.tokens[sequence]
            return next_states(source, layer, weights, x, tokens, observe), inputs

        widest = max(matrix.shape[-1] for matrix in weights.values())
        step = max(self.threads, INPUT_VALUES // (widest * max(map(len, self.states))))
        for first in range(0, len(self.states), step):
            group, seen = range(len(self.states))[first : first + step], dict[str, list[F32]]()
            for sequence, (x, inputs) in zip(
                group, in_order(self.threads, run, group), strict=True
            ):
                self.states[sequence] = x
                for name, values in inputs:
                    seen.setdefault(name, []).append(values)
            if see is not None:
                show = lambda name, see=see, seen=seen: see(name, np.concatenate(seen.pop(name)))
                deque(in_order(self.threads, show, list(seen)), maxlen=0)


def layer_weights(source: Checkpoint, layer: int) -> dict[str, Matrix]:
    """Read all tensors of a layer into memory as float32: name -> matrix."""
    return_freed_memory()  # hundreds of MB, of threads that worked on the previous layer
    names = [f"layers.{layer}.{name}" for name in source.config.layer_shapes(layer)]
    return {name: ArrayMatrix(whole(source.backbone[name])) for name in names}


def _ends(source: Checkpoint) -> dict[str, Matrix]:
    """Return the tensors after the last layer. No logits are needed, so the head is a dummy."""
    row = ArrayMatrix(np.zeros((1, source.config.dim), np.float32))
    bias = ArrayMatrix(np.zeros(1, np.float32))
    ends = {n: m for n, m in source.backbone.items() if n == "norm" or n.endswith(".altup_out")}
    return {**ends, "embedding": row, "head": row, "head.bias": bias}


def importance_vectors(
    source: Checkpoint,
    sequences: Sequence[Sequence[int]],
    layer_done: Callable[[], object] = lambda: None,
    threads: int = 1,
) -> dict[str, F32]:
    """Return matrix name -> importance of its input channels [width], float32, positive.

    Routers, and an embedding that is not the head, are left out. sequences: token ids to run through the
    checkpoint; layer_done: called after each layer. Needs memory for one layer and the hidden states.
    """
    config, sums = source.config, dict[str, F32]()

    def see(name: str, x: F32) -> None:
        squares = np.asarray(np.einsum("tk,tk->k", x, x), np.float32)
        sums[name] = sums[name] + squares if name in sums else squares

    states = HiddenStates(source, sequences, threads)
    for _ in range(config.n_layers):
        states.advance(see)
        layer_done()
    states.advance(see)
    positions = np.float32(sum(map(len, sequences)))
    means = {name: sums[seen] / positions for name, seen in _inputs(config).items()}
    # A share of the mean is added, because a text lacks some inputs, and ggml quantizes a block badly
    # if all its channels have importance 0.
    return {n: np.asarray(m + DAMPING * (m.mean() or 1), np.float32) for n, m in means.items()}


def _inputs(config: ModelConfig) -> dict[str, str]:
    """Return matrix name -> name that numerics.reference gives its input."""
    found = {}
    for name, shape in config.backbone_shapes().items():
        at, _, part = name.rpartition(".")
        if len(shape) < 2 or part == "router" or (part == "embedding" and not config.tied_head):
            continue
        found[name] = f"{at}.{'gate' if part == 'up' else kind_of(name)}" if at else HEAD
    return found
