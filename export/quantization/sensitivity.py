"""Measures how much each matrix of a model loses if it is stored with 4 bits.

The cost of a layer is how far the model diverges on a text if only this layer is rounded. Then each
matrix of the layer is rounded alone. Its share of the layer's cost is proportional to the change of the
layer's output. Only one layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.quantization.exact_model import exact_logits, next_states
from stem_edge.export.quantization.hidden_states import layer_weights
from stem_edge.export.quantization.streams import in_order
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.graph.formats import BEST, MatrixKind
from stem_edge.graph.layer import kind_of
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.matrix import ArrayMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32, fitting_block
from stem_edge.numerics.quantizing import dequantize_blocks, quantize_asymmetric
from stem_edge.numerics.reference import Tokens, embed, head_forward

BITS = 4
TILE_VALUES = 1 << 18  # that are rounded at once
# Product -> its matrices, which are rounded together. V may be separate from qkv.
PRODUCTS = {"qkv": ("wq", "wk"), "v": ("wv",)}


class Cost(NamedTuple):
    """Cost of storing one matrix product (such as qkv) at 4 bits."""

    kind: MatrixKind
    values: int  # in all matrices of the product
    nats: float  # mean divergence from the checkpoint with this product at 4 bits
    left: float = 0.0  # nats of a head whose greatest logits have 8 bits (BackboneFormat.split)


def costs(
    source: Checkpoint,
    token_ids: Sequence[int],
    block: int,
    layer_done: Callable[[], object] = lambda: None,
    threads: int = 1,
) -> dict[str, Cost]:
    """Measure for each matrix product how far the model diverges on a text if only this product has 4 bits.

    token_ids: the text. block: largest number of values that share a scale. Embedding and head are included.
    Excluded are products whose width is not a multiple of a block, and small ones (formats.SMALL_KINDS).
    """
    walk = _Walk(source, token_ids, block, threads)
    for layer in range(source.config.n_layers):
        walk.advance(layer)
        layer_done()
    return walk.costs()


class _Walk:
    """Runs the exact model, and models with one rounded layer each, layer by layer."""

    def __init__(
        self, source: Checkpoint, token_ids: Sequence[int], block: int, threads: int
    ) -> None:
        self._source, self._config, self._block = source, source.config, block
        self._threads = threads
        tokens = Tokens(source.config, source.backbone, token_ids)
        # Rounded part, or "" for the exact model -> hidden states [T, hidden_width], keys and values.
        self._states = {"": (embed(source.config, source.backbone, token_ids), tokens)}
        self._moved: list[dict[str, float]] = []  # layer -> product -> squared change of its result
        if fitting_block(source.config.dim, block):
            rows = _rounded_rows(source.backbone["embedding"], block)
            backbone: dict[str, Matrix] = {**source.backbone, "embedding": rows}
            x = embed(source.config, backbone, token_ids)
            self._states["embedding"] = x, Tokens(source.config, backbone, token_ids)

    def advance(self, layer: int) -> None:
        """Compute a layer in all model variants; add the variant in which only this layer is rounded."""
        at, weights = f"layers.{layer}.", layer_weights(self._source, layer)
        names = [name for name, matrix in weights.items() if _has_choice(name, matrix, self._block)]
        round_ = lambda name: ArrayMatrix(_rounded(whole(weights[name]), self._block))
        rounded = dict(zip(names, in_order(self._threads, round_, names), strict=True))
        exact, products = self._states[""], _products(list(rounded))
        todo = [(weights, *state) for state in self._states.values()]
        todo.append((weights | rounded, exact[0], _branch(exact[1])))
        for parts in products.values():
            todo.append((weights | {n: rounded[n] for n in parts}, exact[0], _branch(exact[1])))
        run = lambda one: (next_states(self._source, layer, *one), one[2])
        found = in_order(self._threads, run, todo)
        self._states = dict(zip([*self._states, at], found, strict=False))
        after = self._states[""][0]
        self._moved.append(
            {
                product: float(np.square(x - after, dtype=np.float64).sum())
                for product, (x, _) in zip(products, found, strict=True)
            }
        )

    def costs(self) -> dict[str, Cost]:
        """Compare logits of rounded models with exact ones; return the cost of each matrix product."""
        backbone, config = self._source.backbone, self._config
        x, _ = self._states.pop("")
        expected = exact_logits(self._source, x)

        def cost(state: F32) -> float:
            return float(divergence(expected, head_forward(config, backbone, state)).mean())

        states = [state for state, _ in self._states.values()]
        nats = dict(zip(self._states, in_order(self._threads, cost, states), strict=True))
        size, made = config.vocab_size * config.dim, dict[str, Cost]()
        if "embedding" in nats:
            name = "embedding" if config.tied_head else "head"
            rounded = {**backbone, name: _rounded_rows(backbone[name], self._block)}
            logits = head_forward(config, rounded, x)
            head = [
                divergence(expected, each).mean() for each in (logits, _split(expected, logits))
            ]
            made["embedding"] = Cost("embedding", size, nats["embedding"])
            made["head"] = Cost("head", size, *map(float, head))
        return made | dict(self._of_layers(nats))

    def _of_layers(self, nats: Mapping[str, float]) -> Iterator[tuple[str, Cost]]:
        for layer, moved in enumerate(self._moved):
            at, total = f"layers.{layer}.", sum(moved.values()) or 1.0
            shapes = self._config.layer_shapes(layer)
            for product, squares in moved.items():
                part = product.removeprefix(at)
                sizes = [shapes[name] for name in PRODUCTS.get(part, (part,)) if name in shapes]
                values = sum(size[0] * size[1] for size in sizes)
                kind: MatrixKind = "v" if part == "v" else kind_of(product)
                yield product, Cost(kind, values, nats[at] * squares / total)


def _split(expected: F32, logits: F32) -> F32:
    """Return a copy of logits [T, V] in which each token's greatest are the expected ones."""
    mixed, best = logits.copy(), np.argpartition(logits, -min(BEST, logits.shape[1]))[:, -BEST:]
    np.put_along_axis(mixed, best, np.take_along_axis(expected, best, axis=1), axis=1)
    return mixed


def _branch(tokens: Tokens) -> Tokens:
    """Return a copy of `tokens` whose keys and values can differ from the original's."""
    other = copy(tokens)
    other.kv = dict(tokens.kv)
    return other


def _rounded_rows(matrix: Tensor, block: int) -> Tensor:
    """Return a matrix whose rows are rounded when read: 4 bits, a scale for `block` values."""
    return matrix.computed(lambda start, stop: _rounded(matrix.rows(start, stop), block))


def _rounded(values: F32, block: int) -> F32:
    """Round a matrix to 4 bits and decode it; a few rows at a time, to stay in the CPU's cache."""
    found, step = np.empty_like(values), max(1, TILE_VALUES // values.shape[1])
    with np.errstate(all="ignore"):  # no warnings, since the states are checked
        for start in range(0, len(values), step):
            rows = values[start : start + step]
            blocks = quantize_asymmetric(rows, BITS, fitting_block(rows.shape[1], block))
            found[start : start + step] = dequantize_blocks(
                blocks.codes, blocks.scales, BITS, blocks.zero_points
            )
    return found


def _has_choice(name: str, matrix: Matrix, max_block: int) -> bool:
    """True if a tensor is a matrix for 4 or 8 bits whose rows divide into blocks (max_block)."""
    shape = matrix.shape
    chosen = len(shape) == 2 and name.rpartition(".")[2] in _PARTS
    return chosen and fitting_block(shape[1], max_block) > 0


def _products(names: Sequence[str]) -> dict[str, list[str]]:
    """Return matrix product -> names of its matrices. For example, product qkv stacks wq and wk."""
    found: dict[str, list[str]] = {}
    for name in names:
        at, _, part = name.rpartition(".")
        product = next((p for p, parts in PRODUCTS.items() if part in parts), part)
        found.setdefault(f"{at}.{product}", []).append(name)
    return found


_PARTS = {"wq", "wk", "wv", "wo", "gate", "up", "down", "project"}
