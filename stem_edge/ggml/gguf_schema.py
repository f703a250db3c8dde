"""What is in backbone.gguf: the contract of exporter and runtime.

A GGUF v3 file of the architecture `stem`: standard names and keys (ggml's docs/gguf.md) wherever
they exist, so that other tools can show the file, and a few of our own. The tables are not in it:
they are in the table store beside it, whose hash is.

| key | type | meaning |
|---|---|---|
| stem.vocab_size, .context_length, .embedding_length, .block_count, .feed_forward_length | uint32 | ModelConfig |
| stem.attention.head_count, .head_count_kv, .key_length, .value_length | uint32 | the same |
| stem.attention.layer_norm_rms_epsilon, stem.rope.freq_base | float32 | the same |
| stem.rope.dimension_count | uint32 | head_dim |
| stem.config | string | all of ModelConfig as JSON: what a model computes |
| stem.layers | array of uint32 | the STEM layers; absent in a dense model, as are the next two |
| stem.ffn | string | what they compute: a key of stem_edge.config.FFN_TERMS |
| stem.tables.sha256 | string | of the table store beside the file (stem_edge.bundle.manifest.tables_hash) |

| tensor | what it is |
|---|---|
| token_embd, output_norm, output, output.bias | embedding, last norm, head (absent if tied) |
| blk.N.attn_norm, attn_q, attn_k, attn_v, attn_output, attn_q_norm, attn_k_norm | attention |
| blk.N.ffn_norm, ffn_gate, ffn_up, ffn_down, post_attention_norm, post_ffw_norm | FFN and norms |
| blk.N.ffn_row_proj | of low-rank tables: what makes rows |

Matrices are [outputs, inputs] row by row, which GGUF writes as ne = [inputs, outputs]. Norms and
biases are float32. q and k are not permuted: the runtime rotates as ModelConfig says.
"""

from __future__ import annotations

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.ggml import types
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import GgufType
from stem_edge.tables.rows import RecordLayout

ARCHITECTURE = "stem"
ALIGNMENT = 32
QUANTIZATION_VERSION = 2  # of ggml's blocks
TABLES_KEY = "stem.tables.sha256"
CONFIG_KEY = "stem.config"

NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "project": "ffn_row_proj",
}

Value = str | int | float | tuple[int, ...]

# Most matrices, and those that llama.cpp gives more bits in the mixture of that name.
BASE: dict[GgufType, tuple[TensorType, TensorType]] = {
    "f32": (types.F32, types.F32),
    "f16": (types.F16, types.F16),
    "q8_0": (types.Q8_0, types.Q8_0),
    "q6_k": (types.Q6_K, types.Q6_K),
    "q5_k_m": (types.Q5_K, types.Q6_K),
    "q4_k_m": (types.Q4_K, types.Q6_K),
    "q4_0": (types.Q4_0, types.Q6_K),
}
# For rows that are no multiple of 256 values, as llama.cpp falls back.
NARROW = {types.Q4_K: types.Q5_0, types.Q5_K: types.Q5_1, types.Q6_K: types.Q8_0}


def gguf_name(name: str) -> str:
    """Name of a backbone tensor (ModelConfig.backbone_shapes) in the file."""
    name, kind = (name[:-5], "bias") if name.endswith(".bias") else (name, "weight")
    if not name.startswith("layers."):
        return f"{NAMES[name]}.{kind}"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def tensor_types(config: ModelConfig, weights: GgufType) -> dict[str, TensorType]:
    """Backbone tensor -> its type in a mixture, as llama.cpp mixes."""
    found: dict[str, TensorType] = {}
    for name, shape in config.backbone_shapes().items():
        found[name] = types.F32 if len(shape) == 1 else _matrix_type(config, weights, name, shape)
    return found


def matrix_types(config: ModelConfig, weights: GgufType) -> list[TensorType]:
    """Types of all matrices in a mixture."""
    chosen = tensor_types(config, weights)
    return [chosen[name] for name, shape in config.backbone_shapes().items() if len(shape) == 2]


def _matrix_type(
    config: ModelConfig, weights: GgufType, name: str, shape: tuple[int, ...]
) -> TensorType:
    usual, better = BASE[weights]
    part = name.rsplit(".", 1)[-1]
    chosen = usual
    if part == "head" or (part == "embedding" and config.tied_head):
        chosen = better
    elif weights.endswith("_m") and part in ("wv", "down"):
        chosen = better if _sensitive(int(name.split(".")[1]), config.n_layers) else usual
    if shape[-1] % chosen.block:
        chosen = NARROW.get(chosen, types.F16)
    return chosen if shape[-1] % chosen.block == 0 else types.F16


def _sensitive(layer: int, layers: int) -> bool:
    """Layers whose wv and down llama.cpp gives more bits: the first and last eighth, a third else."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def backbone_nbytes(config: ModelConfig, weights: GgufType) -> dict[str, int]:
    """Backbone tensor -> bytes of its values in a mixture."""
    chosen = tensor_types(config, weights)
    return {
        name: chosen[name].row_nbytes(shape[-1]) * (shape[0] if len(shape) == 2 else 1)
        for name, shape in config.backbone_shapes().items()
    }


def model_metadata(config: ModelConfig) -> dict[str, Value]:
    """Keys `stem.*` -> values that follow from the model."""
    at = ARCHITECTURE
    # As a manifest gives it back, where 10000 has become 10000.0.
    config = msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig)
    values: dict[str, Value] = {
        f"{at}.vocab_size": config.vocab_size,
        f"{at}.context_length": config.max_context,
        f"{at}.embedding_length": config.dim,
        f"{at}.block_count": config.n_layers,
        f"{at}.feed_forward_length": config.d_ff,
        f"{at}.attention.head_count": config.n_heads,
        f"{at}.attention.head_count_kv": config.n_kv_heads,
        f"{at}.attention.key_length": config.head_dim,
        f"{at}.attention.value_length": config.head_dim,
        f"{at}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{at}.rope.freq_base": config.rope_theta,
        f"{at}.rope.dimension_count": config.head_dim,
        CONFIG_KEY: msgspec.json.encode(config, order="sorted").decode(),
    }
    if config.stem_layers:
        values |= {f"{at}.ffn": config.stem_ffn, f"{at}.layers": config.stem_layers}
    return values


def kv_type(weights: GgufType) -> TensorType:
    """Of keys and values: as exact as the weights, where these are exact."""
    return types.F32 if weights == "f32" else types.F16


def slot_type(layout: RecordLayout) -> TensorType:
    """Of rows in the slots of the row cache: int8 and int4 codes in ggml's blocks, if groups fit."""
    if layout.row_type == "fp16":
        return types.F16
    if not layout.quantized or layout.group_size % types.Q8_0.block:
        return types.F32
    return {8: types.Q8_0, 4: types.Q4_0}[layout.bits]


def slot_nbytes(layout: RecordLayout) -> int:
    """Bytes of one slot: the rows of all STEM layers."""
    return len(layout.layers) * slot_type(layout).row_nbytes(layout.row_width)


def repacks(stored: TensorType, rows: int) -> bool:
    """Whether ggml can rearrange a matrix of so many rows for faster products.

    Builds for some processors cannot: stem_edge.ggml.check finds out.
    """
    return stored in (types.Q4_0, types.Q4_K) and rows % 8 == 0


def repacked_nbytes(config: ModelConfig, weights: GgufType) -> dict[TensorType, int]:
    """Bytes of the matrices that repacking copies, by type; a tied head is copied, the embedding not."""
    chosen, sizes = tensor_types(config, weights), backbone_nbytes(config, weights)
    found: dict[TensorType, int] = {}
    for name, shape in config.backbone_shapes().items():
        copied = len(shape) == 2 and (name != "embedding" or config.tied_head)
        if copied and repacks(chosen[name], shape[0]):
            found[chosen[name]] = found.get(chosen[name], 0) + sizes[name]
    return found
