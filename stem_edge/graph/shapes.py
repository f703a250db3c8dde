"""Shapes of the backbone's tensors as graphs have them: heads padded to what attention accepts."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.formats import MatrixKind
from stem_edge.graph.names import head_width

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Name -> shape of a layer's tensors (ModelConfig.layer_shapes)."""
    return {n: _padded(config, n, s) for n, s in config.layer_shapes(layer).items()}


def backbone_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of all tensors (ModelConfig.backbone_shapes)."""
    return {n: _padded(config, n, s) for n, s in config.backbone_shapes().items()}


def kind_of(name: str) -> MatrixKind:
    """Kind of a matrix by its tensor's name."""
    part = name.rsplit(".", 1)[-1]
    kind: MatrixKind = "qkv" if part in ("wq", "wk", "wv") else part  # type: ignore[assignment]
    return kind


def _padded(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    width, part = head_width(config), name.removesuffix(".bias").rsplit(".", 1)[-1]
    if part in ("wq", "wk", "wv", "q_norm", "k_norm"):
        return (shape[0] // config.head_dim * width, *shape[1:])
    if part == "wo" and len(shape) == 2:
        return shape[0], shape[1] // config.head_dim * width
    return shape
