"""Names of the backbone's graphs, and of their inputs and outputs.

The backbone is split at the first layer that needs rows, so that earlier layers run while records are read from
flash. A step runs the graphs in this order:

| graph | computes |
|---|---|
| embed | token ids -> hidden state |
| early | the layers before the first STEM layer, if any |
| late | the layers from the first STEM layer on, if any |
| rest | the layers that borrow K and V, if any, for the requested positions only |
| head | the final norm and the logits, for the requested positions only |

`prefill` replaces early and late while a prompt is processed: its int8 matrices are faster for many tokens and slower
for one. All graphs share one KV cache. `assistant` drafts the next token of one sequence from that cache
(graph.special.assistant).

A prepared backbone (saved with matrices repacked for one processor) runs early, late, rest and head as one graph,
`step`. It has all of their inputs except `embedded`, because its `hidden` is the output of embed. The early layers
wait for the read of rows, too, because each separate run wakes onnxruntime's threads again, which would cost more
than the overlap saves.

B sequences can take a step of one token together. Each sequence attends to its own part of the KV cache, whose length
seqlens_k contains. In steps of several tokens, and in prefill, B is 1.

`step2`, `step4` and `step8` are `step` for 2, 4 and 8 tokens of one sequence. Each token gets the same bits as in
single-token steps (graph.special.apart).

| input | type, shape | meaning |
|---|---|---|
| token_ids | int64 [B, T] | embed only |
| hidden | float32 [B, T, hidden_width] | all graphs but embed: the output of the previous graph; [B, n, ...] for head after rest |
| embedded | float32 [B, T, hidden_width] | rest with per-layer embeddings, and assistant: the output of embed |
| state | float32 [1, 1, dim] | assistant only: norm.out at the position whose logits the last token was sampled from, or new_state of the last draft |
| wanted | int64 [n] | rest and head: positions in `hidden` whose logits are requested |
| slot_ids | int64 [B, T] | row cache slots that hold the tokens' rows; [B, T + window - 1] if rows are averaged over a window, [B, T, lookups] for n-gram rows |
| row_shares | float32 [B, T + 1, T + window - 1] | if rows are averaged over a window: weight of each row for each token. All weights at index T are 0: with them, a matrix product never has just one row, which kernels would round differently |
| seqlens_k | int32 [B] | tokens in the context after this call, minus one |
| total_length | int32 scalar | tokens in the longest context after this call |
| window_seqlens_k, window_total_length | as the two above | in layers with a window: the same numbers without tokens that the layer's cache has dropped |
| positions | int64 [B, T] | positions of the tokens, for layers with a window |
| rope_cos, rope_sin | float32 [context, head_width/2] | stem_edge.numerics.rope, zero-padded; rope_cos.1 ... where layers have several rotations |
| keys.<l>, values.<l> | float32, int8 or uint8 [B, kv heads, capacity, head_width] | KV cache, also an output; `kv_capacity` returns its capacity; a uint8 contains two 4-bit values (graph.kv) |
| conv.<l> | float32 with float32 keys and values, else float16 [B, 1, capacity, dim] | Engram: inputs of the layer's convolution, a row for each token; also an output, new_conv.<l> |
| row_codes.<l> | uint8, float16 or float32 [slots, width] | row cache slots of a STEM layer |
| row_scales.<l> | float32 [slots, groups] | quantized rows only |
| row_codes.<l>.1, row_scales.<l>.1 | as above, [slots, rows, ...] | if a token's table row is an expert FFN: the expert's down matrix, with `rows` rows; row_codes.<l> then contains gate and up |
| row_zero_points | uint8 [slots, groups*bits/8] | shared by all layers, quantized rows only |

| output | type, shape | meaning |
|---|---|---|
| new_hidden | float32 [B, T, hidden_width] | every graph but head; [B, n, ...] from rest |
| new_keys.<l>, new_values.<l> | as keys.<l> | bound to the same memory as the inputs. Layers that borrow K and V have them only if K and V are quantized, bound to the lender's memory |
| new_keys.<l>.<n>, new_values.<l>.<n> | the same, in step2 to step8 | the cache after token n of the step |
| logits | float32 [B, n, V] | head; and assistant, for the tokens that it scores |
| norm.out | float32 [B, n, dim] | head only, in bundles with an assistant: the input of the head's matrix product |
| new_state | float32 [1, 1, dim] | assistant only: the state for its next draft |
| scored | int32 [1, n] | assistant only, if it scores only the tokens in the most likely clusters of the vocabulary: ids of these tokens |
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
WINDOW = "window_"  # prefix of the two names above, for layers with a window
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
ROW_CODES = "row_codes."

HEAD_MULTIPLE = 16  # GroupQueryAttention refuses other head widths
# Largest step, in tokens, if the context is longer than the KV cache of a layer with a window.
STEP_TOKENS = 128
# Tokens leave the cache of a window in multiples of this number, so rarely, and sums mostly keep their
# order: onnxruntime adds up blocks of keys from the first row on (with 1 MiB of L2 cache: 128 keys of 256 values).
WINDOW_BLOCK = 128


def row_codes(layer: int, part: int = 0) -> str:
    """Return the input name of a layer's row cache. part: 1 for an expert's down matrix."""
    return f"{ROW_CODES}{layer}" + (f".{part}" if part else "")


def row_scales(layer: int, part: int = 0) -> str:
    """Return the name of the graph input with the scales of row_codes(layer, part)."""
    return f"row_scales.{layer}" + (f".{part}" if part else "")


def apart_step(tokens: int) -> str:
    """Return the name of the graph for `tokens` tokens that rounds like single-token steps."""
    return f"{STEP}{tokens}"


def updated_by(cache: str, token: int) -> str:
    """Return the output name, in the graphs step2 to step8, of a KV cache after the step's token number `token`."""
    return f"{cache}.{token}"


def layer_graphs(config: ModelConfig) -> dict[str, range]:
    """Return graph name -> layer numbers, for each decoding graph with layers, in order of execution."""
    own = config.own_kv_layers
    first = min(config.stem_layers[0] if config.stem_layers else own, own)
    graphs = {EARLY: range(first), LATE: range(first, own), REST: range(own, config.n_layers)}
    return {name: layers for name, layers in graphs.items() if layers}


def decode_graphs(config: ModelConfig) -> list[str]:
    return [EMBED, *layer_graphs(config), HEAD]


def head_width(layer: Layer) -> int:
    """Return the width of a head in the graph: head_dim, padded to a multiple of HEAD_MULTIPLE."""
    return -(-layer.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def kv_capacity(window: int, tokens: int) -> int:
    """Return the capacity, in tokens, of a layer's KV cache on the CPU, for a context of `tokens`.

    With a window, there is room for the window, the largest step, and a block of tokens to be dropped.
    """
    return min(tokens, window + WINDOW_BLOCK + STEP_TOKENS) if window else tokens


def rope_names(config: ModelConfig, layer: Layer) -> tuple[str, str]:
    """Return the names of the two graph inputs with a layer's RoPE tables: cosines and sines."""
    number = config.ropes.index(layer.rope)
    end = f".{number}" if number else ""
    return ROPE_COS + end, ROPE_SIN + end
