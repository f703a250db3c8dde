"""Checkpoints of random weights in the shapes of Gemma 4, as Hugging Face folders in bfloat16.

They are for benchmarks: names and sizes are real, the generated text is noise. Weights can be quantized
as in Google's QAT checkpoints for phones (`quant_method: gemma`). The command is tools/make_checkpoint.py.
Tensors are written in pieces, so that a checkpoint may be larger than memory.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from random_tensor import Tensor
from random_tokenizer import write_tokenizer

from stem_edge.export.checkpoints.assistant import shapes_of, tensor_name
from stem_edge.export.checkpoints.hugging_face import packed as form
from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.gemma4_assistant import (
    KIND,
    TOKENS,
    Gemma4Assistant,
)
from stem_edge.export.checkpoints.hugging_face.gemma_ple import CONTEXT, TABLE, GemmaPle
from stem_edge.export.checkpoints.hugging_face.reader import KINDS
from stem_edge.export.tensor_files.safetensors import WEIGHTS

Tensors = dict[str, Tensor]
# Shapes that Google also trained for phones -> bits of a value in the per-layer embeddings.
PACKED = {"gemma-4-e2b": 4, "gemma-4-e4b": 2}
FLOATS = ("per_layer_model_projection", "norm", "layer_scalar")  # endings of float modules
STEP, GATE_STEP = 0.05, 0.3  # gates get hidden states that no norm has scaled
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
    "head_dim": 256,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
}
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads",
    "num_kv_shared_layers",
)  # fmt: skip
# Name -> keys of config.json, SIZES, and the distance between layers of full attention.
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "gemma-4-e2b": (GEMMA_4 | {"use_double_wide_mlp": True}, (1536, 6144, 35, 1, 20), 5),
    "gemma-4-e4b": (GEMMA_4 | {"use_double_wide_mlp": False}, (2560, 10_240, 42, 2, 18), 6),
}
# The drafter of gemma-4-e2b.
ASSISTANT = "gemma-4-e2b-assistant"
DRAFTER: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"], "model_type": KIND,
    "backbone_hidden_size": 1536, "use_ordered_embeddings": True, "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "text_config": COMMON | GEMMA_4 | {
        "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 1, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0,
        "layer_types": [SLIDING] * 3 + [FULL],
    },
}  # fmt: skip


def describe(name: str, packed: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the config.json of shape `name`. changes: keys with other values."""
    if name == ASSISTANT:
        return DRAFTER
    own, sizes, every = SHAPES[name]
    config = COMMON | own | dict(zip(SIZES, sizes, strict=True)) | changes
    layers = config["num_hidden_layers"]
    kinds = [FULL if number % every == every - 1 else SLIDING for number in range(layers)]
    config |= {"layer_types": kinds}
    return _pack(config, PACKED[name]) if packed else config


def _pack(config: dict[str, Any], row_bits: int) -> dict[str, Any]:
    """Return config.json for a quantized model, with the bits of each module as in Google's E2B."""
    rules = {
        r"embed_tokens$|lm_head": 2,
        "embed_tokens_per_layer": row_bits,
        r"layers\.(1[5-9]|[2-9]\d)\.mlp": 2,
        r"per_layer_(input_gate|projection)$": 8,
    }
    stated = {
        "quant_method": form.GEMMA,
        "module_quant_configs": {rule: {"num_bits": bits} for rule, bits in rules.items()},
        "modules_to_not_convert": FLOATS[:1],
        "quantize_embeddings": True,
    }
    return config | {form.QUANTIZED: stated, "tie_word_embeddings": False}


def write_gemma(out: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint with this config.json to the new folder `out`, and return `out`."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    if "vocab_size" in config:  # an assistant has no tokenizer of its own
        write_tokenizer(out, config["vocab_size"])
    _write(out / WEIGHTS, _tensors(config))
    return out


def _tensors(config: dict[str, Any]) -> Tensors:
    """Return tensor name (Hugging Face's) -> tensor, for the whole checkpoint."""
    if config["model_type"] == KIND:
        return _of_assistant(config)
    kind = KINDS[config["model_type"]]
    decoder = kind(**{key: value for key, value in config.items() if key in kind.__struct_fields__})
    if not isinstance(decoder, GemmaPle):
        raise TypeError(f"{config['model_type']} is no Gemma")
    model = decoder.model()
    width = model.n_layers * model.ple_width
    shapes = {decoder.tensor(name): shape for name, shape in model.backbone_shapes().items()} | {
        decoder.inside + CONTEXT: (width, model.dim),
        decoder.inside + TABLE: (model.records, width),
    }
    found: Tensors = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        floats = form.QUANTIZED not in config or module.endswith(FLOATS)
        found |= {name: Tensor(shape)} if floats else _packed(config, module, shape)
    return found


def _of_assistant(config: dict[str, Any]) -> Tensors:
    given = Gemma4Assistant.text(config)
    known = Gemma4Assistant.__struct_fields__
    decoder = Gemma4Assistant(**{key: value for key, value in given.items() if key in known})
    model, clusters = decoder.model(), decoder.num_centroids
    found: Tensors = {}
    for name, shape in shapes_of(model, config["backbone_hidden_size"], clusters).items():
        found[tensor_name(name, model, decoder)] = Tensor(shape)
    return found | {TOKENS: Tensor((model.vocab_size,), "I64")}


def _packed(config: dict[str, Any], module: str, shape: tuple[int, ...]) -> Tensors:
    """Return the tensors of a quantized module: codes, scales and activation scales."""
    rules = config[form.QUANTIZED]["module_quant_configs"].items()
    bits = next((own["num_bits"] for rule, own in rules if re.search(rule, module)), 4)
    codes = Tensor((shape[0], shape[1] * bits // 8), "I8" if bits == 8 else "U8", bits)
    width = config["hidden_size_per_layer_input"] if module.endswith("per_layer") else shape[1]
    scales = Tensor((shape[0], 1), "F32", value=2.5 / (1 << bits - 1) / math.sqrt(width))
    if "embed_tokens" in module:
        return {module + form.EMBEDDED: codes, module + form.EMBEDDED_SCALE: scales}
    step = Tensor((), "F32", value=GATE_STEP if module.endswith("input_gate") else STEP)
    steps = dict.fromkeys((module + ending for ending in form.STEPS), step)
    return {f"{module}.weight": codes, module + form.SCALE: scales} | steps


def _write(path: Path, tensors: Tensors) -> None:
    header, at = dict[str, Any](), 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors.items():
            # A packed head has the codes of its embedding, as transformers saves tied models.
            module = name.rpartition(".")[0].replace("lm_head", "model.embed_tokens")
            random = np.random.default_rng([0, zlib.crc32(module.encode())])
            for piece in tensor.pieces(random):
                file.write(piece.tobytes())
