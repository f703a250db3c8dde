"""Adds lower bits to the rows of a split embedding, and to a token's greatest logits (BackboneFormat.split).

A head of 4 bits reads half the bytes of one of 8. The logits that matter get the other 4 bits, whose input is not rounded.
"""

from __future__ import annotations

from dataclasses import replace

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BEST, BEST_VALUES, LOW_STEPS
from stem_edge.graph.linear import Products
from stem_edge.graph.weight_plan import Blocks


def split_rows(products: Products, ids: str, result: str) -> str:
    """Emit `result`: rows `ids` [B, T] of the embedding, as float32 [B, T, K]."""
    graph, (item,) = products.graph, products.plan.of("embedding", Blocks)
    high = products.gathered(item, "embedding", ids, f"{result}.high")
    low = [_low_rows(products, ids, f"{result}.steps"), graph.float(1 / LOW_STEPS)]
    return graph.add("Add", [high, graph.add("Mul", low, f"{result}.low")], result)


def best_again(products: Products, config: ModelConfig, x: str, logits: str, result: str) -> str:
    """Emit `result`: logits [B, n, V] of x [B, n, K], with lower bits in each token's greatest ones.

    A token's logits do not depend on other tokens of the step.
    """
    graph, size, width = products.graph, min(BEST, config.vocab_size), config.dim
    rows = max(1, BEST_VALUES // width)
    sizes = [min(rows, size - start) for start in range(0, size, rows)]
    parts = [f"best.{number}" for number in range(len(sizes))]
    graph.node("TopK", [logits, graph.sizes([size])], ["best.first", "best.ids"], sorted=0)
    graph.node("Split", ["best.ids", graph.sizes(sizes)], parts, axis=-1)
    column = graph.reshape(x, [0, 0, width, 1], "best.x")
    column, made = graph.add("Mul", [column, graph.float(1 / LOW_STEPS)], "best.steps"), list[str]()
    for rows, ids in zip(sizes, parts, strict=True):
        flat = graph.reshape(ids, [0, -1], f"{ids}.flat")
        found = _low_rows(products, flat, f"{ids}.found")
        found = graph.reshape(found, [0, -1, rows, width], f"{ids}.rows")
        made.append(graph.add("MatMul", [found, column], f"{ids}.logits"))
    low = graph.reshape(graph.add("Concat", made, "best.column", axis=2), [0, 0, size], "best.low")
    exact = graph.add("Add", ["best.first", low], "best.logits")
    return graph.add("ScatterElements", [logits, "best.ids", exact], result, axis=-1)


def _low_rows(products: Products, ids: str, result: str) -> str:
    """Emit `result`: the lower bits of the embedding's rows `ids`, in steps of the higher bits' scales."""
    (item,) = products.plan.of("embedding", Blocks)
    low = tuple(piece.low for piece in item.pieces if piece.low is not None)
    return products.gathered(replace(item, pieces=low), "embedding.low", ids, result)
