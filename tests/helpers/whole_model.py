"""Logits of a whole text by the reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stem_edge.config import ModelConfig
from stem_edge.numerics.arithmetic import Observer
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import Tokens, embed, head_forward, layer_forward


def forward(
    config: ModelConfig,
    backbone: Mapping[str, Matrix],
    tables: Mapping[int, Matrix],
    token_ids: Sequence[int],
    observe: Observer = lambda name, x: None,
) -> F32:
    """Return the logits [T, V]. observe: called with the name and the input of matrices."""
    tokens, x = Tokens(config, backbone, token_ids), embed(config, backbone, token_ids)
    for layer in range(config.n_layers):
        x = layer_forward(config, layer, backbone, tables, x, tokens, observe)
    return head_forward(config, backbone, x, observe)
