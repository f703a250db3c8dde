"""Write any trainer's STEM model in the schema that `stem-edge export` reads (stem_schema.py).

    state = torch.load("last.pt", weights_only=True)["model"]
    names = {
        "tok_embeddings": "model.embed_tokens",
        "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
        "tables.*": "model.layers.*.mlp.stem_table",
    }
    config = ModelConfig(vocab_size=32000, dim=512, ..., stem_layers=(1, 3))
    save_stem(Path("checkpoint"), config, renamed(state, names))

Then run `stem-edge export checkpoint BUNDLE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.checkpoints.hugging_face.reader import CONFIG, TOKENIZER, read_checkpoint
from stem_edge.export.checkpoints.hugging_face.stem_schema import BIAS_NAMES, MODEL_TYPE
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.layers import LinearRope, Llama3Rope, YarnRope

if TYPE_CHECKING:
    from torch import Tensor


def save_stem(
    out: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: ExportedTokenizer | None = None,
) -> None:
    """Write tensors, named as in the schema, to the folder `out`; check them by reading them.

    tokenizer: from convert_tokenizer; without it, put a tokenizer.json there yourself. Raises
    CheckpointError if a tensor is missing, unknown, or has another shape than config says.
    """
    from huggingface_hub import save_torch_state_dict  # `describe` needs no torch

    out.mkdir(parents=True, exist_ok=True)
    tied = tensor_name("head") if config.tied_head else ""
    parts = {n: t.contiguous() for n, t in tensors.items() if n != tied}
    # Copy a tensor that is a view of a larger one, because safetensors refuses views.
    alone = {n: t.untyped_storage().nbytes() == t.nbytes for n, t in parts.items()}
    save_torch_state_dict({n: t if alone[n] else t.clone() for n, t in parts.items()}, out)
    _write(out / CONFIG, describe(config))
    if tokenizer is not None:
        (out / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
        _write(out / "tokenizer_config.json", tokenizer.config)
        if tokenizer.eos_ids:
            _write(out / "generation_config.json", {"eos_token_id": list(tokenizer.eos_ids)})
    read_checkpoint(out)


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename the listed modules of a trainer's tensors; `*` stands for a layer's number."""
    patterns = [
        (re.compile(re.escape(old).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias)?"), new)
        for old, new in names.items()
    ]
    result = {}
    for name, tensor in state.items():
        for pattern, new in patterns:
            if match := pattern.fullmatch(name):
                *numbers, ending = match.groups()
                name = new.replace("*", "{}").format(*numbers) + (ending or "")
                break
        result[name] = tensor
    return result


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json."""
    modules = {name: module for module, name in BIAS_NAMES.items()}
    windows = [config.window(layer) for layer in range(config.n_layers)]
    known: dict[str, Any] = {
        "architectures": ["StemForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "rope_parameters": _describe_rope(config),
        "rope_interleave": config.rope_interleaved,
        "stem_layers": list(config.stem_layers),
        "stem_ffn": config.stem_ffn,
        "stem_rank": config.row_rank,
        "stem_window": config.row_window,
        "stem_experts": config.row_experts,
        "ngram_order": config.ngram_order,
        "ngram_rows": list(config.ngram_sizes),
        "ngram_end": config.ngram_end,
        "ngram_multipliers": [list(numbers) for numbers in config.ngram_multipliers],
        "ngram_filler": config.ngram_filler,
        "engram_kernel": config.engram_kernel,
        "num_experts": config.n_experts,
        "biases": [modules[name] for name in config.biases],
        "qk_norm_eps": config.qk_norm_eps,
        "post_norms": config.post_norms,
        "final_logit_softcapping": config.logit_softcap or None,
    }
    if config.bos_id is not None:
        known["bos_token_id"] = config.bos_id
    if config.eos_ids:
        known["eos_token_id"] = list(config.eos_ids)
    if any(windows):
        known["sliding_window"] = config.sliding_window
        known["layer_types"] = [SLIDING if window else FULL for window in windows]
    return known


def _describe_rope(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    match config.rope_scaling:
        case LinearRope() as scaling:
            rope |= {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Rope() | YarnRope() as scaling:
            fields = msgspec.structs.asdict(scaling)
            original = fields.pop("original_context")
            rope |= fields | {"original_max_position_embeddings": original}
            rope["rope_type"] = "llama3" if isinstance(scaling, Llama3Rope) else "yarn"
    return rope


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
