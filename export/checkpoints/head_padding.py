"""Pads attention heads with zeros to the width that an engine needs, or reorders their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.export.tensor_files.tensor import Read, Tensor
from stem_edge.graph.names import head_width
from stem_edge.layers import Layer
from stem_edge.numerics.matrix import ArrayMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32


def pad_heads(
    config: ModelConfig, number: int, tensors: Mapping[str, Matrix]
) -> Mapping[str, Matrix]:
    """Return a layer's tensors with attention heads zero-padded from head_dim to head_width."""
    layer = config.layer(number)
    extra = head_width(layer) - layer.head_dim
    if not extra:
        return tensors
    parts, padded = _parts(config, layer), dict(tensors)
    for name in parts.keys() & tensors.keys():
        grown = _padded(layer, parts[name], whole(tensors[name]))
        if name.endswith("_norm"):  # scaled, since the mean of squares is over the padded width
            grown *= np.sqrt(np.float32(layer.head_dim / head_width(layer)))
        padded[name] = ArrayMatrix(grown)
    padded["wo"] = ArrayMatrix(_pad(whole(tensors["wo"]).T, config.n_heads, extra).T)
    return padded


def pad_vector(config: ModelConfig, number: int, matrix: str, vector: F32) -> F32:
    """Zero-pad the attention heads in a vector, such as a bias, of `matrix`: "wq", "wk" or "wv"."""
    layer = config.layer(number)
    return _padded(layer, _parts(config, layer)[matrix], vector)


def _parts(config: ModelConfig, layer: Layer) -> dict[str, int]:
    """Return tensor name -> number of parts to pad: attention heads, or their halves for RoPE."""
    # If RoPE pairs a value of a head's first half with one of its second half, pad both halves.
    halves = 1 if config.rope_interleaved else 2
    parts = {
        "wq": config.n_heads * halves,
        "wk": layer.n_kv_heads * halves,
        "wv": layer.n_kv_heads,
        "q_norm": halves,
        "k_norm": halves,
    }
    return parts | {f"{name}.bias": parts[name] for name in ("wq", "wk", "wv")}


def _padded(layer: Layer, parts: int, rows: F32) -> F32:
    """Append zeros to each of the `parts` heads, or half heads, of `rows`, up to head_width."""
    extra = (head_width(layer) - layer.head_dim) * (len(rows) // layer.head_dim)
    return _pad(rows, parts, extra // parts)


def _pad(array: F32, parts: int, extra: int) -> F32:
    """Pad [parts * n, ...] to [parts * (n + extra), ...], with zeros at the end of each part."""
    cut = array.reshape(parts, -1, *array.shape[1:])
    grown = np.pad(cut, ((0, 0), (0, extra), *((0, 0) for _ in array.shape[1:])))
    return grown.reshape(-1, *array.shape[1:])


def order_heads(tensor: Tensor, order: npt.NDArray[np.intp]) -> Tensor:
    """Return a matrix or vector with the rows of each head reordered.

    order: order[i] is the old number, in its head, of the row that becomes row i.
    """
    size = len(order)
    if tensor.shape[0] % size:
        return tensor  # check_shapes raises an error later

    def change(read: Read[Any]) -> Read[Any]:
        def ordered(start: int, stop: int) -> Any:
            first = start // size * size
            values = read(first, -(-stop // size) * size)  # heads are read whole
            heads = values.reshape(-1, size, *values.shape[1:])[:, order]
            return np.ascontiguousarray(heads.reshape(values.shape)[start - first : stop - first])

        return ordered

    return tensor.reread(tensor.shape[0], change)
