"""Schema of backbone.gguf, which the exporter writes and the runtime reads.

The file is GGUF v3 with the architecture `stem`. Its names are those of ggml's docs/gguf.md wherever they exist,
so that other tools can show it. The key `stem.config` contains the whole ModelConfig as JSON. The tables are in the
bundle's table store.

| tensor | meaning |
|---|---|
| token_embd, output_norm, output, output.bias | embedding, last norm, head (absent if tied) |
| blk.N.attn_norm, attn_q, attn_k, attn_v, attn_output, attn_q_norm, attn_k_norm | attention |
| blk.N.ffn_norm, ffn_gate, ffn_up, ffn_down, post_attention_norm, post_ffw_norm | FFN and norms |
| blk.N.ffn_row_proj | expands the rows of low-rank tables |
| blk.N.ffn_row_mix | scalar of a stem-mix layer; its logistic function is the weight of the token's row |
| blk.N.ffn_row_router | router of a token's rows, which are mixed by the softmax of its scores |
| blk.N.per_layer_model_proj, inp_gate, proj, post_norm; per_layer_proj_norm | per-layer embeddings |
| blk.N.layer_output_scale | factor by which a layer's result is multiplied |

Matrices are [outputs, inputs] in row-major order, which GGUF writes as ne = [inputs, outputs]. Norms, biases and
routers are float32. q and k are not permuted, because the runtime applies RoPE as ModelConfig says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stem_edge.config import ModelConfig
from stem_edge.ggml import types
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import PLE_KINDS, GgufType, OwnTypes
from stem_edge.graph.kv import KvType
from stem_edge.layers import Layer
from stem_edge.tables.rows import RecordLayout

ARCHITECTURE = "stem"
ALIGNMENT = 32
QUANTIZATION_VERSION = 2  # of ggml's blocks
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
    "mix": "ffn_row_mix",
    "router": "ffn_row_router",
    "ple_context": "per_layer_model_proj",
    "ple_norm": "per_layer_proj_norm",
    "ple_gate": "inp_gate",
    "ple_out": "proj",
    "ple_post_norm": "post_norm",
    "layer_scale": "layer_output_scale",
}

Value = str | int

# Mixture -> type of most matrices, and of the matrices that get more bits in llama.cpp.
BASE: dict[GgufType, tuple[TensorType, TensorType]] = {
    "f32": (types.F32, types.F32),
    "f16": (types.F16, types.F16),
    "q8_0": (types.Q8_0, types.Q8_0),
    "q6_k": (types.Q6_K, types.Q6_K),
    "q5_k_m": (types.Q5_K, types.Q6_K),
    "q4_k_m": (types.Q4_K, types.Q6_K),
    "q4_0": (types.Q4_0, types.Q6_K),
}
# llama.cpp's fallbacks for row widths that are not a multiple of 256.
NARROW = {types.Q4_K: types.Q5_0, types.Q5_K: types.Q5_1, types.Q6_K: types.Q8_0}


KV_TENSORS: dict[KvType, TensorType] = {
    "fp32": types.F32,
    "fp16": types.F16,
    "int8": types.Q8_0,
    "int4": types.Q4_0,
}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a backbone tensor from its name in ModelConfig.backbone_shapes."""
    name, kind = (name[:-5], "bias") if name.endswith(".bias") else (name, "weight")
    if not name.startswith("layers."):
        return f"{NAMES[name]}.{kind}"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def foreign_parts(config: ModelConfig) -> list[str]:
    """Return the names of the model's features that the ggml engine cannot run."""
    parts = {name.removesuffix(".bias").rsplit(".", 1)[-1] for name in config.backbone_shapes()}
    parts |= {"sparsity"} if any(layer.sparsity for layer in config.layers) else set()
    parts |= {"ranges"} if config.ranges else set()
    if config.ngram_order:
        parts = {part for part in parts if not part.startswith("engram_")} | {"rows of n-grams"}
    return sorted(parts - NAMES.keys())


def tensor_types(config: ModelConfig, weights: GgufType | OwnTypes) -> dict[str, TensorType]:
    """Return backbone tensor name -> type. weights: a mixture such as q4_k_m, or OwnTypes.

    llama.cpp's rules choose the types of a mixture. OwnTypes map names of matrices, like "wq", to
    types. Raises ValueError for a missing or unknown name, and for rows that end within a block.
    """
    if not isinstance(weights, str):
        return _own_types(config, weights)
    return {
        name: types.F32 if _floats(name, shape) else _matrix_type(config, weights, name, shape)
        for name, shape in config.backbone_shapes().items()
    }


def _own_types(config: ModelConfig, given: OwnTypes) -> dict[str, TensorType]:
    known = {kept.name: kept for kept in types.KEPT_TYPES.values()}
    found, used = dict[str, TensorType](), set[str]()
    for name, shape in config.backbone_shapes().items():
        if _floats(name, shape):
            found[name] = types.F32
            continue
        key = name if name in given else name.rpartition(".")[2]
        kept = known.get(given.get(key, ""))
        if kept is None or shape[-1] % kept.block:
            raise ValueError(f"{name} {list(shape)} cannot be {given.get(key, 'of no type')}")
        found[name] = kept
        used.add(key)
    if unused := given.keys() - used:
        raise ValueError(f"types of {min(unused)!r}, which the model has not")
    return found


def _floats(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for vectors and routers, which every mixture stores as float32."""
    return len(shape) == 1 or name.endswith(".router")


def short_types(by_tensor: Mapping[str, TensorType]) -> OwnTypes:
    """Return matrix name such as "wq" -> usual type, and full name -> type of exceptions."""
    parts: dict[str, Counter[str]] = {}
    for name, kind in by_tensor.items():
        parts.setdefault(name.rpartition(".")[2], Counter())[kind.name] += 1
    usual = {part: counts.most_common(1)[0][0] for part, counts in parts.items()}
    others = {n: t.name for n, t in by_tensor.items() if t.name != usual[n.rpartition(".")[2]]}
    return usual | others


def _matrix_type(
    config: ModelConfig, weights: GgufType, name: str, shape: tuple[int, ...]
) -> TensorType:
    usual, better = BASE[weights]
    part = name.rsplit(".", 1)[-1]
    more_bits = part == ("embedding" if config.tied_head else "head")
    if weights.endswith("_m") and part in ("wv", "down"):
        more_bits = _sensitive(int(name.split(".")[1]), config.n_layers)
    chosen = better if more_bits else usual
    if part in PLE_KINDS and chosen.block > 1:
        chosen = types.Q8_0
    if shape[-1] % chosen.block:
        chosen = NARROW.get(chosen, types.F16)
    return chosen if shape[-1] % chosen.block == 0 else types.F16


def _sensitive(layer: int, n_layers: int) -> bool:
    """Return True if llama.cpp stores `wv` and `down` of this layer with more bits."""
    eighth = n_layers // 8  # the first and last eighth are sensitive, and every third layer between
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def backbone_nbytes(config: ModelConfig, weights: GgufType | OwnTypes) -> dict[str, int]:
    chosen = tensor_types(config, weights)
    return {
        name: chosen[name].row_nbytes(shape[-1]) * (shape[0] if len(shape) == 2 else 1)
        for name, shape in config.backbone_shapes().items()
    }


def usual_kv(weights: GgufType | OwnTypes) -> KvType:
    return "fp32" if weights == "f32" else "fp16"


def kv_nbytes(kv: KvType, layer: Layer) -> int:
    return 2 * layer.n_kv_heads * KV_TENSORS[kv].row_nbytes(layer.head_dim)


def kv_obstacle(config: ModelConfig, kv: KvType) -> str:
    """Return why a model's KV cache cannot have this type, with a remedy; "" if it can."""
    block = KV_TENSORS[kv].block
    wrong = [layer.head_dim for layer in config.layers if layer.head_dim % block]
    narrow = f"ggml needs heads of a multiple of {block} values, and these have"
    return f"{narrow} {wrong[0]}; take fp16, or onnxruntime" if wrong else ""


def slot_type(layout: RecordLayout) -> TensorType:
    """Return the ggml type of rows in the row cache; F32 if no smaller type fits the layout."""
    if layout.row_type == "fp16":
        return types.F16
    if not layout.quantized or layout.group_size % types.Q8_0.block:
        return types.F32
    return {8: types.Q8_0, 4: types.Q4_0}[layout.bits]


def slot_nbytes(layout: RecordLayout) -> int:
    """Return the bytes of a row cache slot: one token's rows of all STEM layers."""
    return len(layout.layers) * slot_type(layout).row_nbytes(layout.row_width)
