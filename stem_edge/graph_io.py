"""The backbone's graphs, and the names of their inputs and outputs: the contract of both halves.

The backbone is cut where rows are first needed, so that what comes before can run while a record is
still on its way from flash. A step runs the graphs in this order:

| graph | file | does |
|---|---|---|
| embed | backbone.embed.onnx | token ids -> hidden state |
| early | backbone.early.onnx | the layers before the first STEM layer, if there are any |
| late | backbone.late.onnx | the layers from the first STEM layer on, if there are any |
| head | backbone.head.onnx | the last norm and the head, for those positions whose logits are wanted |

`prefill` (prefill.onnx, optional) stands for early and late together when a prompt is processed: its
matrices are int8, which is faster for many tokens and slower for one. All graphs share one KV cache.

| input | type, shape | meaning |
|---|---|---|
| token_ids | int64 [1, T] | embed only |
| hidden | float32 [1, T, dim] | all others: what the graph before gave |
| slot_ids | int64 [1, T] | row cache slots that hold the tokens' rows |
| seqlens_k | int32 [1] | tokens in the context after this call, less one |
| total_length | int32 scalar | tokens in the context after this call |
| rope_cos, rope_sin | float32 [context, head_width/2] | stem_edge.rope, zero-padded |
| keys.<l>, values.<l> | float32 [1, kv heads, capacity, head_width] | KV cache, also an output |
| row_codes.<l> | uint8, float16 or float32 [slots, width] | row cache slots of a STEM layer |
| row_scales.<l> | float32 [slots, groups] | quantized rows only |
| row_codes.<l>.1, row_scales.<l>.1 | the same, [slots, rows, ...] | an expert's second matrix |
| row_zero_points | uint8 [slots, groups*bits/8] | the same for all layers, quantized rows only |

| output | type, shape | meaning |
|---|---|---|
| new_hidden | float32 [1, T, dim] | of all but the head |
| new_keys.<l>, new_values.<l> | as keys.<l> | bound to the same memory as the inputs |
| logits | float32 [1, T, V] | of the head |
"""

from __future__ import annotations

from stem_edge.config import ModelConfig

EMBED = "embed"
EARLY = "early"
LATE = "late"
HEAD = "head"
PREFILL = "prefill"

TOKEN_IDS = "token_ids"
HIDDEN = "hidden"
SLOT_IDS = "slot_ids"
SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_length"
ROPE_COS = "rope_cos"
ROPE_SIN = "rope_sin"
KEYS = "keys."
VALUES = "values."
NEW = "new_"
ROW_ZERO_POINTS = "row_zero_points"
LOGITS = "logits"

HEAD_MULTIPLE = 16  # GroupQueryAttention refuses other head widths


def graph_file(graph: str) -> str:
    """File of a graph in the bundle."""
    return "prefill.onnx" if graph == PREFILL else f"backbone.{graph}.onnx"


def row_codes(layer: int, part: int = 0) -> str:
    """Input that holds the slots of one part (ModelConfig.row_parts) of a layer's rows."""
    return f"row_codes.{layer}" + (f".{part}" if part else "")


def row_scales(layer: int, part: int = 0) -> str:
    """Input that holds the scales of these."""
    return f"row_scales.{layer}" + (f".{part}" if part else "")


def layer_graphs(config: ModelConfig) -> dict[str, range]:
    """Graph -> its layers, of those graphs with layers that decoding needs, in order."""
    first = config.stem_layers[0] if config.stem_layers else config.n_layers
    graphs = {EARLY: range(first), LATE: range(first, config.n_layers)}
    return {name: layers for name, layers in graphs.items() if layers}


def decode_graphs(config: ModelConfig) -> list[str]:
    """All graphs that decoding needs, in order."""
    return [EMBED, *layer_graphs(config), HEAD]


def head_width(config: ModelConfig) -> int:
    """Width of a head in the graph: head_dim, padded with zeros to what the operator accepts."""
    return -(-config.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
