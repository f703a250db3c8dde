"""Small Gemma 4 checkpoints in the form that QAT for phones leaves: packed codes, scales and ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gemma_folders import VOCAB_SIZE, make_tokenizer
from hf_folders import make_gemma
from safetensors.torch import save_file
from transformers import GemmaQuantizationConfig
from transformers.integrations.gemma_quant import (
    QuantizedEmbedding,
    QuantizedLinear,
    replace_with_quant_layers,
)

# As Google's E2B has them: 2 bits for head and embedding and in later layers, 8 in small matrices.
RULES = {
    r"embed_tokens$|lm_head": {"num_bits": 2},
    r"layers\.[45]\.mlp": {"num_bits": 2},
    r"layers\.1\.self_attn\.[qkv]_proj": {"num_bits": 8},  # others have 4
    r"per_layer_(input_gate|projection)": {"num_bits": 8},
}
TOKENS = 40


class Packed(NamedTuple):
    """A folder, and what transformers computes with it."""

    folder: Path
    model: Any
    ids: list[int]
    logits: Any  # [T, V]


def write_packed(
    folder: Path,
    *,
    ranges: bool = True,
    row_scales: int = 1,
    row_bits: int = 4,
    seed: int = 1,
    reach: float = 1.0,
    **changes: Any,
) -> Packed:
    """Write a folder of random codes.

    row_scales: of a row of per-layer embeddings. reach: of ranges, relative to the inputs seen.
    """
    sizes = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}
    model = make_gemma(**(sizes | {"max_position_embeddings": 256} | changes))
    rules = {"embed_tokens_per_layer": {"num_bits": row_bits}} | RULES
    config = GemmaQuantizationConfig(
        quantize_embeddings=True,
        module_quant_configs=rules,
        modules_to_not_convert=["per_layer_model_projection"],
    )
    replace_with_quant_layers(model, config, config.modules_to_not_convert)
    random = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            width = module.in_features
            module.weight.data = _codes(module.out_features, width, module.num_bits, random)
            module.weight_scale.data = _scales(module.out_features, 1, module.num_bits, random)
            module.weight_scale.data /= width**0.5
        elif isinstance(module, QuantizedEmbedding):
            count, width, bits = module.num_embeddings, module.embedding_dim, module.num_bits
            each = row_scales if "per_layer" in name else 1
            module.embedding_quantized.data = _codes(count, width, bits, random)
            module.embedding_scale.data = _scales(count, each, bits, random)
    model.lm_head.weight.data = model.model.embed_tokens.embedding_quantized.data.clone()
    model.lm_head.weight_scale.data = model.model.embed_tokens.embedding_scale.data.clone()
    for name, value in model.named_parameters():
        # Flat scores and small changes, as trained models have.
        if "q_norm" in name or "post" in name:
            value.data *= 0.3
    ids = torch.randint(3, VOCAB_SIZE, (1, TOKENS), generator=random)
    if ranges:
        _calibrate(model, ids, reach)
    save_file(
        {n: v.contiguous() for n, v in model.state_dict().items()}, folder / "model.safetensors"
    )
    stated = model.config.to_dict() | {"tie_word_embeddings": False, "dtype": "float32"}
    stated["quantization_config"] = config.to_dict()
    (folder / "config.json").write_text(json.dumps(stated, default=str))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    )
    with torch.no_grad():
        return Packed(folder, model, ids[0].tolist(), model(ids).logits[0].numpy())


def _codes(count: int, width: int, bits: int, random: torch.Generator) -> torch.Tensor:
    half = 1 << (bits - 1)
    drawn = torch.randn(count, width, generator=random) * half / 2.5
    codes = drawn.round().clamp(-half, half - 1).to(torch.int64)
    if bits == 8:
        return codes.to(torch.int8)
    each, packed = 8 // bits, torch.zeros(count, width * bits // 8, dtype=torch.int64)
    for at in range(each):
        packed |= (codes[:, at::each] + half) << (bits * at)
    return packed.to(torch.uint8)


def _scales(count: int, each: int, bits: int, random: torch.Generator) -> torch.Tensor:
    return (torch.rand(count, each, generator=random) + 0.5) * 2.5 / (1 << (bits - 1))


def _calibrate(model: Any, ids: torch.Tensor, reach: float) -> None:
    """Give each matrix the ranges of its input and result on these tokens."""
    seen: dict[QuantizedLinear, tuple[float, float]] = {}

    def see(module: Any, given: Any, result: Any) -> None:
        seen[module] = given[0].abs().max().item(), result.abs().max().item()

    modules = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    hooks = [module.register_forward_hook(see) for module in modules]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    for module, (given, result) in seen.items():
        module.input_activation_scale.data = torch.tensor(reach * given / 126)
        if module is not model.lm_head:
            module.output_activation_scale.data = torch.tensor(result / 126)


def divergence(expected: Any, found: Any) -> float:
    """Mean KL divergence of next-token distributions from the expected ones, in nats."""
    p, q = (_log_probabilities(one.astype(np.float64)) for one in (expected, found))
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def _log_probabilities(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
