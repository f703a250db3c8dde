"""Computes a token's greatest logits again, from rows of the embedding, after a head of 4 bits.

If embedding and head are one matrix in the model, the exact rows are there anyway. A 4-bit head reads half the
bytes of an 8-bit one; the logits that matter have the exactness of 8 bits, without rounded inputs.
"""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.graph.linear import Products


def best_again(products: Products, config: ModelConfig, x: str, logits: str, result: str) -> str:
    """Emit `result`: logits [B, n, V] of x [B, n, K], with each token's greatest computed again.

    A token's logits do not depend on other tokens of the step.
    """
    graph, size, width = products.graph, products.format.best(config), config.dim
    name = "best"
    ids, rows = f"{name}.ids", f"{name}.rows"
    graph.node("TopK", [logits, graph.sizes([size])], [f"{name}.first", ids], sorted=0)
    flat = graph.reshape(ids, [0, -1], f"{ids}.flat")
    products.rows(flat, rows, (config.vocab_size, width))
    each = graph.reshape(rows, [0, -1, size, width], f"{rows}.of_tokens")
    column = graph.reshape(x, [0, 0, width, 1], f"{name}.x")
    exact = graph.add("MatMul", [each, column], f"{name}.column")
    exact = graph.reshape(exact, [0, 0, size], f"{name}.again")
    return graph.add("ScatterElements", [logits, ids, exact], result, axis=-1)
