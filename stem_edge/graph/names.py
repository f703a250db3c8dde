"""Names of the backbone's graphs, and of their inputs and outputs.

The backbone is cut where rows are first needed, so that what comes before can run while a record is
still on its way from flash. A step runs the graphs in this order:

| graph | does |
|---|---|
| embed | token ids -> hidden state |
| early | the layers before the first STEM layer, if there are any |
| late | the layers from the first STEM layer on, if there are any |
| rest | the layers that read K and V of others, if there are any, for the wanted positions alone |
| head | the last norm and the head, for those positions whose logits are wanted |

`prefill` stands for early and late together when a prompt is processed: its matrices are int8, which
is faster for many tokens and slower for one. All graphs share one KV cache.

| input | type, shape | meaning |
|---|---|---|
| token_ids | int64 [1, T] | embed only |
| hidden | float32 [1, T, dim] | all others: what the graph before gave; the head after rest: [1, n, dim] |
| embedded | float32 [1, T, dim] | rest only, with per-layer embeddings: what embed gave |
| wanted | int64 [n] | rest and head: the places in `hidden` whose logits are wanted |
| slot_ids | int64 [1, T] | row cache slots that hold the tokens' rows |
| seqlens_k | int32 [1] | tokens in the context after this call, less one |
| total_length | int32 scalar | tokens in the context after this call |
| rope_cos, rope_sin | float32 [context, head_width/2] | stem_edge.numerics.rope, zero-padded; rope_cos.1 ... where layers have several rotations |
| keys.<l>, values.<l> | float32 [1, kv heads, capacity, head_width] | KV cache, also an output |
| row_codes.<l> | uint8, float16 or float32 [slots, width] | row cache slots of a STEM layer |
| row_scales.<l> | float32 [slots, groups] | quantized rows only |
| row_codes.<l>.1, row_scales.<l>.1 | the same, [slots, rows, ...] | an expert's second matrix |
| row_zero_points | uint8 [slots, groups*bits/8] | the same for all layers, quantized rows only |

| output | type, shape | meaning |
|---|---|---|
| new_hidden | float32 [1, T, dim] | of all but the head; of rest [1, n, dim] |
| new_keys.<l>, new_values.<l> | as keys.<l> | bound to the same memory as the inputs |
| logits | float32 [1, n, V] | of the head |

backbone.onnx in the bundle is embed, early, late and head in one graph, for other tools: without
hidden, new_hidden and wanted, and with row.<l> as portable graphs have it.

Accelerators run variants of these graphs over the same weights. "fp32" and "fp16" keep everything in
the memory of a device. They differ from the above in this:

| graph | differs |
|---|---|
| all | fp16: what is float32 above is float16, but for logits and rows that are stored as floats |
| early, late | rows have an even number of groups (graph.device_rows): some providers want that |
| rows | puts rows into slots: records int32 [n, words], slots int64 [n, 1] and each row_codes.<l> and row_scales.<l> as int32 [slots, words] -> the same with new_ before it, in the same memory |
| top | logits float32 [1, n, V], count int64 [1] -> top_logits float32 and top_ids int64, [1, n, count] |

"portable" has ONNX's own operators alone and leaves to the runtime what they would need sizes for:
rows, places of RoPE and the KV cache come in ready for use. Its graphs are embed, early, late and
head, float32 throughout.

| input or output of portable | shape | meaning |
|---|---|---|
| rope_cos, rope_sin | [T, head_width/2] | of the step's places |
| mask.<w> | [T, P + T] | added to scores: 0, or MASKED; P tokens were there before. One for each width w of a window in the model, 0 where there is none |
| keys.<l>, values.<l> | [1, P, kv heads, head_width] | of those; not an output |
| row.<l> | [1, T, row width] | rows of the tokens |
| new_keys.<l>, new_values.<l> | [1, T, kv heads, head_width] | of the step's tokens alone |
"""

from __future__ import annotations

from typing import Literal, get_args

from stem_edge.config import Layer, ModelConfig

Variant = Literal["fp32", "fp16", "portable"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

EMBED = "embed"
EARLY = "early"
LATE = "late"
REST = "rest"
HEAD = "head"
PREFILL = "prefill"
ROWS = "rows"  # of variants for devices
TOP = "top"

TOKEN_IDS = "token_ids"
HIDDEN = "hidden"
EMBEDDED = "embedded"
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
WANTED = "wanted"
RECORDS = "records"
SLOTS = "slots"
COUNT = "count"
TOP_LOGITS = "top_logits"
TOP_IDS = "top_ids"
MASK = "mask."
ROW = "row."
ROW_CODES = "row_codes."
MASKED = -1e9  # added to a score, leaves nothing of it after the softmax

HEAD_MULTIPLE = 16  # GroupQueryAttention refuses other head widths


def mask_name(window: int) -> str:
    """Input of portable graphs: the mask of layers with a window of this width."""
    return f"{MASK}{window}"


def row_name(layer: int) -> str:
    """Input of portable graphs: the rows of a STEM layer."""
    return f"{ROW}{layer}"


def row_codes(layer: int, part: int = 0) -> str:
    """Input that holds the slots of one part (ModelConfig.row_parts) of a layer's rows."""
    return f"{ROW_CODES}{layer}" + (f".{part}" if part else "")


def row_scales(layer: int, part: int = 0) -> str:
    """Input that holds the scales of these."""
    return f"row_scales.{layer}" + (f".{part}" if part else "")


def layer_graphs(config: ModelConfig) -> dict[str, range]:
    """Graph -> its layers, of those graphs with layers that decoding needs, in order."""
    own = config.own_kv_layers
    first = min(config.stem_layers[0] if config.stem_layers else own, own)
    graphs = {EARLY: range(first), LATE: range(first, own), REST: range(own, config.n_layers)}
    return {name: layers for name, layers in graphs.items() if layers}


def decode_graphs(config: ModelConfig) -> list[str]:
    """All graphs that decoding needs, in order."""
    return [EMBED, *layer_graphs(config), HEAD]


def head_width(layer: Layer) -> int:
    """Width of a head in the graph: head_dim, padded with zeros to what the operator accepts."""
    return -(-layer.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def rope_names(config: ModelConfig, layer: Layer) -> tuple[str, str]:
    """Inputs that hold the rotation of a layer: cosines and sines."""
    number = config.ropes.index(layer.rope)
    end = f".{number}" if number else ""
    return ROPE_COS + end, ROPE_SIN + end
