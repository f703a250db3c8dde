"""Names of the backbone graph's inputs and outputs: the contract of exporter and runtime.

| input | type, shape | meaning |
|---|---|---|
| token_ids, slot_ids | int64 [1, T] | the tokens, and the row cache slots that hold their rows |
| seqlens_k | int32 [1] | tokens in the context after this call, less one |
| total_length | int32 scalar | tokens in the context after this call |
| logits_from | int64 [1] | first position of the T whose logits are wanted |
| rope_cos, rope_sin | float32 [context, head_width/2] | stem_edge.rope, zero-padded |
| keys.<l>, values.<l> | float32 [1, kv heads, context, head_width] | KV cache, also an output |
| row_codes.<l> | uint8, float16 or float32 [slots, width] | row cache slots of a STEM layer |
| row_scales.<l> | float32 [slots, groups] | quantized rows only |
| row_zero_points | uint8 [slots, groups*bits/8] | the same for all layers, quantized rows only |

| output | type, shape | meaning |
|---|---|---|
| logits | float32 [1, n, V] | of the positions from logits_from on |
| new_keys.<l>, new_values.<l> | as keys.<l> | bound to the same memory as the inputs |
"""

from __future__ import annotations

from stem_edge.config import ModelConfig

TOKEN_IDS = "token_ids"
SLOT_IDS = "slot_ids"
SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_length"
LOGITS_FROM = "logits_from"
ROPE_COS = "rope_cos"
ROPE_SIN = "rope_sin"
KEYS = "keys."
VALUES = "values."
NEW = "new_"
ROW_CODES = "row_codes."
ROW_SCALES = "row_scales."
ROW_ZERO_POINTS = "row_zero_points"
LOGITS = "logits"

HEAD_MULTIPLE = 16  # GroupQueryAttention refuses other head widths


def head_width(config: ModelConfig) -> int:
    """Width of a head in the graph: head_dim, padded with zeros to what the operator accepts."""
    return -(-config.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
