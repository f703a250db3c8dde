"""Names of the backbone's graphs, and of their inputs and outputs.

The backbone is split where rows are first needed, so that the layers before can run while records
are still being read from flash. A step runs the graphs in this order:

| graph | computes |
|---|---|
| embed | token ids -> hidden state |
| early | the layers before the first STEM layer, if any |
| late | the layers from the first STEM layer on, if any |
| rest | the layers that borrow K and V, if any, for the requested positions only |
| head | the final norm and the logits, for the requested positions only |

`prefill` replaces early and late while a prompt is processed: its int8 matrices are faster for many
tokens and slower for one. All graphs share one KV cache. `assistant` drafts the next token of one
sequence from what the others left there (graph.special.assistant).

A prepared backbone runs early, late, rest and head as one graph, `step`, with the inputs of all of
them but `embedded`. Each run wakes onnxruntime's threads anew, which costs more than the layers
before the first row hide of its read, so these wait for it, too.

B sequences can take a step of one token together, and each attends to as many rows of its part of
the KV cache as seqlens_k says. In steps of several tokens, and in prefill, B is 1.

`step2`, `step4` and `step8` are `step` for so many tokens, each of which gets the bits of a step of its
own (graph.special.apart).

| input | type, shape | meaning |
|---|---|---|
| token_ids | int64 [B, T] | embed only |
| hidden | float32 [B, T, hidden_width] | all others: the output of the previous graph; [B, n, ...] for head after rest |
| embedded | float32 [B, T, hidden_width] | rest with per-layer embeddings, and assistant: the output of embed |
| state | float32 [1, 1, dim] | assistant only: norm.out of the token before the last one chosen, or new_state |
| wanted | int64 [n] | rest and head: positions in `hidden` whose logits are requested |
| slot_ids | int64 [B, T] | row cache slots that hold the tokens' rows; [B, T + window - 1] where rows are means, [B, T, lookups] of n-grams |
| row_shares | float32 [B, T + 1, T + window - 1] | with such means: what each of these rows is worth to a token; zeros for one more, because kernels round a single one otherwise |
| seqlens_k | int32 [B] | tokens in the context after this call, minus one |
| total_length | int32 scalar | tokens in the longest context after this call |
| window_seqlens_k, window_total_length | as the two above | the same without tokens that have left the window's cache |
| positions | int64 [B, T] | of the tokens, for layers with a window |
| rope_cos, rope_sin | float32 [context, head_width/2] | stem_edge.numerics.rope, zero-padded; rope_cos.1 ... where layers have several rotations |
| keys.<l>, values.<l> | float32, int8 or uint8 [B, kv heads, capacity, head_width] | KV cache, also an output; `kv_capacity` says how long it is; two values of 4 bits are a uint8 (graph.kv) |
| conv.<l> | float32, or float16 beside keys and values of other types [B, 1, capacity, dim] | Engram: what the convolution of the layer adds up, a row for each token; also an output, new_conv.<l> |
| row_codes.<l> | uint8, float16 or float32 [slots, width] | row cache slots of a STEM layer |
| row_scales.<l> | float32 [slots, groups] | quantized rows only |
| row_codes.<l>.1, row_scales.<l>.1 | as above, [slots, rows, ...] | an expert's second matrix |
| row_zero_points | uint8 [slots, groups*bits/8] | shared by all layers, quantized rows only |

| output | type, shape | meaning |
|---|---|---|
| new_hidden | float32 [B, T, hidden_width] | every graph but head; [B, n, ...] from rest |
| new_keys.<l>, new_values.<l> | as keys.<l> | bound to the same memory as the inputs; of layers that borrow K and V, if they are quantized, to the lender's |
| new_keys.<l>.<n>, new_values.<l>.<n> | the same, in step2 to step8 | as the token n of the step leaves them |
| logits | float32 [B, n, V] | head, and assistant of the tokens that it scores |
| norm.out | float32 [B, n, dim] | head only, in bundles with an assistant: what the head multiplies |
| new_state | float32 [1, 1, dim] | assistant only: the state for its next draft |
| scored | int32 [1, n] | assistant only, with clusters: ids of the tokens that it scores |
"""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.layers import Layer

EMBED = "embed"
EARLY = "early"
LATE = "late"
REST = "rest"
HEAD = "head"
STEP = "step"
PREFILL = "prefill"
ASSISTANT = "assistant"

TOKEN_IDS = "token_ids"
HIDDEN = "hidden"
EMBEDDED = "embedded"
STATE = "state"
STATES = "norm.out"
SCORED = "scored"
SLOT_IDS = "slot_ids"
ROW_SHARES = "row_shares"
SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_length"
WINDOW = "window_"  # prefix of those two in layers with a window
POSITIONS = "positions"
ROPE_COS = "rope_cos"
ROPE_SIN = "rope_sin"
KEYS = "keys."
VALUES = "values."
CONV = "conv."
NEW = "new_"
ROW_ZERO_POINTS = "row_zero_points"
LOGITS = "logits"
WANTED = "wanted"
PLACES = "places"
MASK = "mask."
ROW = "row."
ROW_CODES = "row_codes."
MASKED = -1e9  # added to a score, so that its weight after the softmax is 0

HEAD_MULTIPLE = 16  # GroupQueryAttention refuses other head widths
# Most tokens of a step in a context that is longer than the cache of a window.
STEP_TOKENS = 128
# Tokens leave the cache of a window in multiples of this number: seldom, and so that sums mostly
# keep their order. onnxruntime adds keys up in blocks from the first row, as long as the
# processor's cache allows (128 keys of 256 values, with 1 MiB of second-level cache).
WINDOW_BLOCK = 128


def mask_name(window: int) -> str:
    """Name the mask input of graphs on accelerators for layers with a window of this width."""
    return f"{MASK}{window}"


def row_name(layer: int) -> str:
    """Name the input of backbone.onnx for the rows of a STEM layer."""
    return f"{ROW}{layer}"


def row_codes(layer: int, part: int = 0) -> str:
    """Name the input with the slots of one part (ModelConfig.row_parts) of a layer's rows."""
    return f"{ROW_CODES}{layer}" + (f".{part}" if part else "")


def row_scales(layer: int, part: int = 0) -> str:
    """Name the input with the scales of row_codes."""
    return f"row_scales.{layer}" + (f".{part}" if part else "")


def apart_step(tokens: int) -> str:
    """Name the graph of a step whose tokens have the same bits as in single-token steps."""
    return f"{STEP}{tokens}"


def updated_by(cache: str, token: int) -> str:
    """Name the output for a cache after a token of such a step that is not the last one."""
    return f"{cache}.{token}"


def layer_graphs(config: ModelConfig) -> dict[str, range]:
    """Map each decoding graph that has layers to those layers, in order of execution."""
    own = config.own_kv_layers
    first = min(config.stem_layers[0] if config.stem_layers else own, own)
    graphs = {EARLY: range(first), LATE: range(first, own), REST: range(own, config.n_layers)}
    return {name: layers for name, layers in graphs.items() if layers}


def decode_graphs(config: ModelConfig) -> list[str]:
    """Return the names of the decoding graphs, in order of execution."""
    return [EMBED, *layer_graphs(config), HEAD]


def head_width(layer: Layer) -> int:
    """Return the width of a head in the graph: head_dim, padded to a multiple of HEAD_MULTIPLE."""
    return -(-layer.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def kv_capacity(window: int, tokens: int) -> int:
    """Return how many tokens' keys and values a layer keeps on the CPU, in a context of `tokens`.

    With a window, these are what the tokens of a step see, from the start of a block on.
    """
    return min(tokens, window + WINDOW_BLOCK + STEP_TOKENS) if window else tokens


def rope_names(config: ModelConfig, layer: Layer) -> tuple[str, str]:
    """Name the inputs with the rotation of a layer: cosines and sines."""
    number = config.ropes.index(layer.rope)
    end = f".{number}" if number else ""
    return ROPE_COS + end, ROPE_SIN + end
