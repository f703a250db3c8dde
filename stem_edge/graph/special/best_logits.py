"""Computes a token's greatest logits again, from rows of the embedding, after a head of 4 bits.

If embedding and head are one matrix in the model, the exact rows are there anyway. A 4-bit head reads half the
bytes of an 8-bit one; the logits that matter have the exactness of 8 bits, without rounded inputs.
"""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BEST_VALUES
from stem_edge.graph.linear import Products


def best_again(products: Products, config: ModelConfig, x: str, logits: str, result: str) -> str:
    """Emit `result`: logits [B, n, V] of x [B, n, K], with each token's greatest computed again.

    A token's logits do not depend on other tokens of the step.
    """
    graph, size, width = products.graph, products.format.best(config), config.dim
    rows = max(1, BEST_VALUES // width)
    sizes = [min(rows, size - start) for start in range(0, size, rows)]
    parts = [f"best.{number}" for number in range(len(sizes))]
    graph.node("TopK", [logits, graph.sizes([size])], ["best.first", "best.ids"], sorted=0)
    graph.node("Split", ["best.ids", graph.sizes(sizes)], parts, axis=-1)
    column, made = graph.reshape(x, [0, 0, width, 1], "best.x"), list[str]()
    for rows, ids in zip(sizes, parts, strict=True):
        flat = graph.reshape(ids, [0, -1], f"{ids}.flat")
        found = products.rows(flat, f"{ids}.found", (config.vocab_size, width))
        found = graph.reshape(found, [0, -1, rows, width], f"{ids}.rows")
        made.append(graph.add("MatMul", [found, column], f"{ids}.logits"))
    exact = graph.add("Concat", made, "best.column", axis=2)
    exact = graph.reshape(exact, [0, 0, size], "best.logits")
    return graph.add("ScatterElements", [logits, "best.ids", exact], result, axis=-1)
