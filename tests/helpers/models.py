"""Fourteen small models, one of each kind, as checkpoints and bundles; written without torch.

Weights come from seeded generators, so that only logits must be stored (tests/data/blackbox.npz,
which tests/helpers/freeze_logits.py writes).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from installed import DATA, DEMO
from safetensors.numpy import save_file
from stem_format import describe

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.layers import BIASED, LinearRope, Llama3Rope, YarnRope
from stem_edge.numerics.quantize import F32

ORT, GGML, DEVICE = "onnxruntime", "ggml", "device"
CONFORMANCE = DATA / "conformance"
END, EOS = 7, 257  # end documents: in models with n-grams, and in those with means of rows
SIZES: dict[str, Any] = {
    "vocab_size": 260, "dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 8, "d_ff": 80,
    "stem_layers": (1, 2), "norm_eps": 1e-5, "rope_theta": 1e4, "max_context": 512,
}  # fmt: skip
WIDE: dict[str, Any] = {"head_dim": 32, "n_heads": 2, "n_kv_heads": 1}  # as int8 keys on ggml need
ENGRAM: dict[str, Any] = {
    "stem_ffn": "engram", "stem_layers": (0, 2), "row_rank": 16, "ngram_order": 3,
    "ngram_sizes": (101, 103, 107, 109, 113, 127, 131, 137),
    "ngram_multipliers": ((23703573157769, 20109073645365, 8052911324071), (5, 999983, 77777777)),
    "ngram_filler": 3, "ngram_end": END, "engram_kernel": 4, "sliding_window": 5,
}  # fmt: skip
NGRAMS: dict[str, Any] = {
    "stem_ffn": "ngrams", "stem_layers": (0,), "row_rank": 16, "ngram_order": 4,
    "ngram_sizes": (101, 103, 105, 107, 109, 211), "ngram_end": END,
}  # fmt: skip
# Each part of the format is in one of them.
STEM: dict[str, dict[str, Any]] = {
    "stem": {"n_kv_heads": 6, "rope_scaling": Llama3Rope(8, 1, 4, 16)},
    "dense": {
        "stem_layers": (), "rope_interleaved": False, "head_dim": 24, "rope_scaling": LinearRope(2.0),
        "logit_softcap": 3.0, "biases": ("wq", "wk", "wv", "head"),
    },
    "stem-plus": {"stem_ffn": "stem-plus", "row_rank": 32, "tied_head": True, **WIDE},
    "gate": {
        "stem_ffn": "stem-gate", "row_rank": 16, "biases": ("up", "down"), "stem_layers": (0, 1, 2),
    },
    "mixture": {
        "stem_ffn": "stem-plus", "row_experts": 4, "row_window": 3, "qk_norm_eps": 1e-2,
        "stem_layers": (0, 2), "eos_ids": (EOS,),
    },
    "hash-moe": {"stem_ffn": "hash-moe", "n_experts": 5, "post_norms": True, "stem_layers": (0, 1, 2)},
    "windows": {
        "stem_ffn": "stem-mix", "row_rank": 16, "rope_interleaved": False, **WIDE,
        "rope_scaling": YarnRope(2, 16, 1.07, truncate=False), "sliding_window": 7,
        "window_layers": (0, 2), "qk_norm_eps": 1e-6, "biases": BIASED, "post_norms": True,
        "logit_softcap": 5.0,
    },
    "engram": ENGRAM,
    "ngrams": NGRAMS,
}  # fmt: skip
GEMMAS = {"gemma4": "gemma4-text", "gemma3n": "gemma3n-text"}  # with trained folders
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 307,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 7,
    "sliding_window_pattern": 6, "query_pre_attn_scalar": 24, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
    "dtype": "float32",
}  # fmt: skip


class Kind(NamedTuple):
    """What a model can do, and how near its logits are to the reference."""

    engines: tuple[str, ...] = (ORT, GGML, DEVICE)
    edits: bool = True  # whether other tokens' rows can be looked up
    long: bool = False  # whether texts go beyond what layers with a window keep
    tolerance: float = 1e-4  # of logits
    tie: float = 1e-3  # most that the logit of a greedy token may be below the best one
    nats: float = 0.0  # mean divergence of logits that are rounded, which is compared instead
    kv: tuple[str, ...] = (ORT,)  # engines that can keep keys and values in 8 bits


KINDS: dict[str, Kind] = {
    "stem": Kind(),
    "dense": Kind(edits=False),
    "stem-plus": Kind(kv=(ORT, GGML)),
    "gate": Kind(),
    "mixture": Kind(engines=(ORT, GGML)),
    "hash-moe": Kind(engines=(ORT, GGML)),
    "windows": Kind(long=True, kv=(ORT, GGML)),
    "engram": Kind(engines=(ORT,), edits=False, long=True),
    "ngrams": Kind(engines=(ORT,), edits=False),
    "gemma3": Kind(edits=False, long=True, tolerance=1e-3, tie=5e-3),
    "gemma4": Kind(long=True, tolerance=1e-3, tie=5e-3),
    "gemma3n": Kind(engines=(ORT, DEVICE), long=True, tolerance=1e-3, tie=5e-3),
    "phone": Kind(engines=(ORT,), tolerance=1.0, tie=1.0, nats=4e-3, kv=()),
    "demo": Kind(engines=(ORT, DEVICE), tolerance=0.5, tie=1.0, nats=2e-3),
}
# Answers to the long ones are where windows drop tokens; files keep prompts of 128 tokens at least.
LONG, SHORT = (380, 1, 40, 17), (150, 1, 40, 17)


def prompts(name: str) -> list[list[int]]:
    """Token ids of four prompts of very different lengths; documents end in those with n-grams."""
    sizes, rng = LONG if KINDS[name].long else SHORT, np.random.default_rng(11)
    long = rng.integers(10, 250, max(sizes)).tolist()
    ends = {"engram": END, "ngrams": END, "mixture": EOS}
    for at in (13, 26, 27) if name in ends else ():
        long[-at] = ends[name]
    return [long[-size:] for size in sizes]


def stem_model(name: str) -> tuple[ModelConfig, dict[str, F32], dict[int, F32]]:
    """A random model: its tensors by backbone_shapes(), and layer -> table [records, row width]."""
    config, rng = ModelConfig(**(SIZES | STEM[name])), np.random.default_rng(0)
    tensors = {
        tensor: _random(tensor, shape, rng) for tensor, shape in config.backbone_shapes().items()
    }
    if config.tied_head:  # so that no logit is far above the others
        tensors["embedding"] *= np.float32(0.15)
    tables = {}
    for layer in config.row_layers:
        parts = [
            rng.standard_normal((config.records, math.prod(part)), np.float32)
            / np.float32(math.sqrt(part[1]) if len(part) == 2 else 1)
            for part in config.row_parts()
        ]
        tables[layer] = np.concatenate(parts, axis=1)
    return config, tensors, tables


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    values = rng.standard_normal(shape, np.float32)
    if name.endswith("norm"):
        return 1 + np.float32(0.3) * values
    if name.endswith(".bias"):
        return np.float32(0.5) * values
    if len(shape) == 1 or name == "embedding":
        return values
    gain = 2 if name.endswith((".wq", ".wk")) else 1  # attention that prefers some tokens
    return np.asarray(gain * values / math.sqrt(shape[1]), np.float32)


def expert_of_token(config: ModelConfig) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The expert of each token; every expert has some."""
    return (np.arange(config.vocab_size) * 7 + 3) % config.n_experts


def _stored(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """Describe a random model, and name its tensors as in the schema of STEM checkpoints."""
    config, tensors, tables = stem_model(name)
    special: dict[str, Any] = {}
    if config.stem_ffn == "engram":
        special = _engram(config, tensors, tables[config.row_layers[0]])
    elif config.stem_ffn == "ngrams":
        count = len(config.ngram_sizes)
        projects = np.split(tensors.pop("layers.0.project"), count, axis=1)
        parts = _split(tables[0], config.ngram_sizes)
        for number, pair in enumerate(zip(parts, projects, strict=True)):
            for part, tensor in zip(("embedders", "post_projs"), pair, strict=True):
                special[f"model.ngram_embeddings.{part}.{number}.weight"] = tensor
    else:
        for layer, table in tables.items():
            special |= _rows(config, f"model.layers.{layer}.mlp.", table)
    if config.n_experts:
        special["model.expert_of_token"] = expert_of_token(config)
    if config.tied_head:
        tensors.pop("head", None)
    return config, {tensor_name(key): value for key, value in tensors.items()} | special


def _rows(config: ModelConfig, at: str, table: F32) -> dict[str, F32]:
    if not config.n_experts:
        return {at + "stem_table.weight": table}
    inner, outer = (math.prod(part) for part in config.row_parts())
    both = table[:, :inner].reshape(-1, config.d_ff, 2, config.dim)
    down = table[:, inner : inner + outer].reshape(-1, config.dim, config.d_ff)
    parts = {"gate": both[:, :, 0], "up": both[:, :, 1], "down": down}
    return {f"{at}experts.{part}_proj.weight": value for part, value in parts.items()}


def _engram(config: ModelConfig, tensors: dict[str, F32], table: F32) -> dict[str, F32]:
    """Take the tensors of Engram modules out, and name them as in the schema."""
    stored: dict[str, F32] = {}
    each = len(config.ngram_sizes) // len(config.stem_layers)
    starts = range(0, len(config.ngram_sizes), each)
    sizes = [sum(config.ngram_sizes[at : at + each]) for at in starts]
    for layer, part in zip(config.stem_layers, _split(table, sizes), strict=True):
        at, inside = f"layers.{layer}.", f"model.layers.{layer}.engram."
        key, value = np.split(tensors.pop(at + "project"), 2)
        stored |= {inside + "key_proj.weight": key, inside + "value_proj.weight": value}
        stored[inside + "embed.weight"] = part
        for norm in ("query_norm", "key_norm", "conv_norm"):
            stored[f"{inside}{norm}.weight"] = tensors.pop(f"{at}engram_{norm}")
        taps = [tensors.pop(f"{at}engram_conv_{tap}") for tap in range(config.engram_kernel)]
        stored[inside + "conv.weight"] = np.stack(taps, axis=1)[:, None]
    return stored


def _split(table: F32, sizes: Any) -> list[F32]:
    return np.split(table, np.cumsum(sizes)[:-1])


def _gemma3() -> dict[str, F32]:
    """Random tensors of GEMMA_3, with scores so flat that rounding changes little."""
    rng, size, wide = np.random.default_rng(0), GEMMA_3["hidden_size"], GEMMA_3["intermediate_size"]
    heads, width = GEMMA_3["num_attention_heads"], GEMMA_3["head_dim"]
    own = GEMMA_3["num_key_value_heads"] * width
    matrices = {
        "self_attn.q_proj": (heads * width, size), "self_attn.k_proj": (own, size),
        "self_attn.v_proj": (own, size), "self_attn.o_proj": (size, heads * width),
        "mlp.gate_proj": (wide, size), "mlp.up_proj": (wide, size), "mlp.down_proj": (size, wide),
    }  # fmt: skip
    norms = {"self_attn.q_norm": width, "self_attn.k_norm": width} | dict.fromkeys(
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
         "post_feedforward_layernorm"), size,
    )  # fmt: skip
    found = {"embed_tokens": rng.standard_normal((GEMMA_3["vocab_size"], size)) * 0.2}
    for layer in range(GEMMA_3["num_hidden_layers"]):
        for name, shape in matrices.items():
            values = rng.standard_normal(shape) * 1.5 / math.sqrt(shape[1])
            found[f"layers.{layer}.{name}"] = values
        for name, length in norms.items():
            found[f"layers.{layer}.{name}"] = rng.standard_normal(length) * 0.4
        found[f"layers.{layer}.self_attn.q_norm"] -= 0.7  # 1 is added to the weights of norms
    found["norm"] = rng.standard_normal(size) * 0.4
    return {f"model.{name}.weight": value.astype(np.float32) for name, value in found.items()}


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint of a model, or return the one that is in tests/data."""
    if name == "phone":
        return CONFORMANCE / "gemma4-mobile"
    if name in GEMMAS:  # the same weights, in a longer context
        shutil.copytree(CONFORMANCE / GEMMAS[name], folder)
        config = json.loads((folder / "config.json").read_text())
        changed = json.dumps(config | {"max_position_embeddings": 512})
        (folder / "config.json").write_text(changed)
        return folder
    folder.mkdir()
    if name == "gemma3":
        save_file(_gemma3(), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(GEMMA_3))
        shutil.copy(CONFORMANCE / "gemma4-text" / "tokenizer.json", folder)
        return folder
    config, tensors = _stored(name)
    whole = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(describe(config)))
    tokenizer = convert_tokenizer("bytes", None, add_bos=True)
    (folder / "tokenizer.json").write_text(tokenizer.json)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.config))
    ends = json.dumps({"eos_token_id": list(tokenizer.eos_ids)})
    (folder / "generation_config.json").write_text(ends)
    return folder


EXACT: dict[str, dict[str, Any]] = {
    ORT: {"type": "fp32", "rows": "fp32"},
    GGML: {"engine": "ggml", "type": "f32", "rows": "fp32"},
}


def once(lock: Path, done: Path, make: Callable[[], object]) -> None:
    """Make something in one process of several; the others wait for it."""
    with FileLock(lock):
        if not done.exists():
            make()
            done.touch()


def checkpoint_of(name: str, shared: Path) -> Path:
    """The checkpoint of a model in a folder that all processes of a session share."""
    place = shared / f"{name}.place"

    def make() -> None:
        place.write_text(str(write_checkpoint(name, shared / name)))

    once(shared / f"{name}.lock", shared / f"{name}.done", make)
    return Path(place.read_text())


def bundle_of(name: str, engine: str, shared: Path) -> Path:
    """The bundle of a model for an engine, exported once in a session."""
    if name == "demo":
        return DEMO
    engine = ORT if engine == DEVICE else engine
    checkpoint, out = checkpoint_of(name, shared), shared / f"{name}-{engine}"
    options: dict[str, Any] = {} if name == "phone" else dict(EXACT[engine])

    def make() -> None:
        if name.startswith("gemma"):  # the scales of keys are those of a text like the prompts
            text = shared / f"{name}-{engine}.npy"
            np.save(text, np.random.default_rng(9).integers(10, 250, 2000))
            options["calibration"] = text
        stem_edge.export_bundle(checkpoint, out, progress=False, **options)

    once(out.with_suffix(".lock"), out.with_suffix(".done"), make)
    return out
