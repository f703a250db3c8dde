"""Models and checkpoint folders of Hugging Face's transformers, to be changed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exports
import numpy as np
import torch
import transformers
from installed import DATA
from safetensors.torch import load_file, save_file
from whole_model import forward

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.hugging_face.reader import read_checkpoint
from stem_edge.numerics.quantize import F32, I64


def edit(folder: Path, file: str = "config.json", **values: Any) -> None:
    """Change values of a JSON file."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, *parts: str) -> None:
    """Check that reading the folder is refused with a message that has these parts."""
    exports.refused(lambda: read_checkpoint(folder), folder, *parts)


def logits(checkpoint: Checkpoint, ids: list[int]) -> F32:
    """Logits [T, V] of the reference."""
    return forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, ids)


def check_logits(model: Any, folder: Path, ids: list[int], most: float = 5e-4) -> None:
    """Save a model of transformers, and check that what is read has its logits."""
    model.save_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits(read_checkpoint(folder), ids) - expected).max() < most
    assert np.abs(expected).max() > 1


SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
STEEP = YARN | {"beta_fast": 4.0, "beta_slow": 0.2}  # so that the ramp lies within a small head
EVERY_SECOND = ["full_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, MHA, tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama, own head_dim": ("llama", {"head_dim": 24, "rope_parameters": LLAMA3}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": (
        "llama",
        {"head_dim": 32, "rope_parameters": YARN | {"original_max_position_embeddings": 512}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "mistral, yarn": (
        "mistral",
        {
            "head_dim": 32,
            "sliding_window": None,
            "rope_parameters": STEEP | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False},
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen2, yarn": (
        "qwen2",
        {"head_dim": 32, "rope_parameters": STEEP | {"attention_factor": 0.8}},
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": EVERY_SECOND},
    ),
    "qwen3, biases, tied": (
        "qwen3",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def make_model(name: str, seed: int = 0) -> Any:
    """Make a model of random weights in which every tensor affects the logits."""
    kind, options = MODELS[name]
    config = getattr(transformers, CLASSES[kind] + "Config")(**(SIZES | options))
    config._attn_implementation = "eager"
    model = getattr(transformers, CLASSES[kind] + "ForCausalLM")(config).eval()
    return randomized(model, seed)


def randomized(model: Any, seed: int = 0) -> Any:
    """Fill every tensor of a model with random numbers; return the model."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=random)
            spread = 0.4 if tensor.ndim == 1 else 1.5 / math.sqrt(tensor.shape[1])
            tensor.copy_(noise * spread + float(tensor_name.endswith("norm.weight")))
    return model


GEMMA: dict[str, Any] = {
    "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
    "max_position_embeddings": 64, "sliding_window": 7, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip


def make_gemma(**changes: Any) -> Any:
    """Make a text model of Gemma 4 in which every tensor affects the logits."""
    config = transformers.Gemma4TextConfig(**(GEMMA | changes))
    config._attn_implementation = "eager"
    model = randomized(transformers.Gemma4ForCausalLM(config).eval())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.layer_scalar.fill_(0.9)
    return model


def written(model: Any, folder: Path) -> Path:
    """Write a model, and a tokenizer of fewer ids."""
    model.save_pretrained(folder)
    shutil.copy(DATA / "conformance" / "gemma4-text" / "tokenizer.json", folder)
    return folder


def write_gemma(folder: Path, tokens: int) -> tuple[I64, F32]:
    """Write a checkpoint whose last layers borrow K and V; return ids and transformers' logits."""
    model = make_gemma(max_position_embeddings=1024, vocab_size=307, vocab_size_per_layer_input=307)
    written(model, folder)
    ids = np.random.default_rng(0).integers(90, size=tokens)
    with torch.no_grad():
        return ids, model(torch.tensor(ids[None])).logits[0].numpy()


def write_flat(folder: Path, name: str, tokens: int = 40) -> tuple[list[int], F32]:
    """Write a Gemma with scores so flat that rounding changes little; return ids and logits [T, V].

    No logit is greater than 5, as in trained models of this size.
    """
    make = {"gemma3": make_gemma3, "gemma4": make_gemma, "gemma3n": make_gemma3n}[name]
    rows = {} if name == "gemma3" else {"vocab_size_per_layer_input": 307}
    model = make(hidden_size=64, vocab_size=307, **rows)
    norms = {layer.self_attn.q_norm.weight: 0.1 for layer in model.model.layers}
    norms[model.model.norm.weight] = 0.5
    added = float(name == "gemma3")  # to the weights of its norms, by the model
    ids = np.random.default_rng(0).integers(90, size=tokens).tolist()
    with torch.no_grad():
        for weight, factor in norms.items():
            weight.copy_(factor * (weight + added) - added)
        written(model, folder)
        return ids, model(torch.tensor([ids])).logits[0].numpy()


GEMMA_3: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "sliding_window": 7, "query_pre_attn_scalar": 24,
}  # fmt: skip


def make_gemma3(**changes: Any) -> Any:
    """Make a text model of Gemma 3 in which every tensor affects the logits."""
    config = transformers.Gemma3TextConfig(**(GEMMA_3 | changes))
    config._attn_implementation = "eager"
    model = randomized(transformers.Gemma3ForCausalLM(config).eval())
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor -= 1  # which the model adds
    return model


GEMMA_3N: dict[str, Any] = {
    "vocab_size": 97, "vocab_size_per_layer_input": 90, "hidden_size": 32,
    "intermediate_size": [160] * 6, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2, "max_position_embeddings": 64, "sliding_window": 7,
    "laurel_rank": 16, "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.5, 0.0, 0.95],
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip


def make_gemma3n(**changes: Any) -> Any:
    """Make a text model of Gemma 3n in which every tensor affects the logits.

    Its FFNs are wide enough that some of the sparse gates stay open: a norm follows, which would
    amplify the rounding of an output that is nearly 0.
    """
    config = transformers.Gemma3nTextConfig(**(GEMMA_3N | changes))
    config._attn_implementation = "eager"
    return randomized(transformers.Gemma3nForCausalLM(config).eval())


def wrap_gemma(folder: Path, **options: Any) -> None:
    """Make a text model of Gemma the text model of a multimodal one, with towers."""
    text = json.loads((folder / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "text_config": text | {"dtype": None}, "dtype": text["dtype"]}
    (folder / "config.json").write_text(json.dumps(whole | {"vision_config": {}} | options))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    inside = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    towers = {f"model.{name}.weight": torch.ones(2) for name in ("vision_tower.a", "embed_audio.b")}
    save_file(inside | towers, folder / "model.safetensors")
