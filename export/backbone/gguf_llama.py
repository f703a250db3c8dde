"""Dense models as llama.cpp computes them: its architectures, keys and tensors.

| model | architecture in the file |
|---|---|
| no norms of q and k; biases anywhere but at the head | llama, which rotates pairs |
| norms of q and k; biases of q, k and v | qwen3, which rotates halves |

Where a model rotates the other way, the rows of q and k are reordered within each head, which
changes no dot product. The mixtures of tensor types are llama.cpp's (stem_edge.ggml.gguf_schema).
Models that neither architecture computes are refused: those with STEM layers, norms after attention
and FFN, soft caps, windows, and the rest of `_obstacles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.bundle.manifest import FileEntry
from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.export.backbone.gguf import FILE_TYPES
from stem_edge.export.backbone.gguf_values import TensorSource
from stem_edge.export.backbone.gguf_writer import GgufValue, write_gguf
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.head_padding import head_rows
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.ggml import gguf_schema
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import F32 as FLOAT32
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import GgufType
from stem_edge.layers import LinearRope, Llama3Rope, YarnRope
from stem_edge.numerics.matrix import ArrayMatrix, Matrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import frequency_factors

LLAMA, QWEN3 = "llama", "qwen3"
BIASES = {
    LLAMA: ("wq", "wk", "wv", "wo", "gate", "up", "down"),
    QWEN3: ("wq", "wk", "wv"),
}
ROTATED = ("wq", "wk", "q_norm", "k_norm")
ROPE_FACTORS = "rope_freqs.weight"
YARN_TURNS = (32.0, 1.0)  # beta_fast and beta_slow, which no key of these architectures sets


def write_dense(
    path: Path,
    ggml: Ggml,
    source: Checkpoint,
    weights: GgufType,
    tokenizer: Mapping[str, GgufValue],
    *,
    types: Mapping[str, TensorType] | None = None,
    importance: Mapping[str, F32] | None = None,
    threads: int = 1,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> FileEntry:
    """Write the file itself. Raises ExportError for a model that llama.cpp cannot compute.

    tokenizer: its keys and values, as tokenizer_metadata has them.
    types: types of tensors of the backbone that differ from the mixture `weights`.
    importance: matrix of the backbone -> importance of its input channels [width].
    """
    architecture = architecture_of(source)
    config, importance = source.config, importance or {}
    chosen = {**gguf_schema.tensor_types(config, weights), **(types or {})}
    rope, factors = _rope(config, architecture)
    values = {**_metadata(source, architecture, weights), **rope, **tokenizer}
    tensors = []
    if factors is not None:
        tensors.append(TensorSource(ROPE_FACTORS, ArrayMatrix(factors), FLOAT32, "rope"))
    for name, shape in config.backbone_shapes().items():
        part = name.split(".")[2] if name.startswith("layers.") else name
        matrix = _turned(config, architecture, part, source.backbone[name])
        vector = importance.get(name) if len(shape) == 2 else None
        tensors.append(
            TensorSource(gguf_schema.gguf_name(name), matrix, chosen[name], part, vector)
        )
    return write_gguf(path, ggml, values, tensors, threads, ErrorMeter(), advance)


def architecture_of(source: Checkpoint) -> str:
    """Return llama.cpp's architecture for a model. Raises ExportError if llama.cpp has no such architecture."""
    architecture = LLAMA if source.config.qk_norm_eps is None else QWEN3
    found = _obstacles(source.config, architecture)
    if found:
        raise ExportError(
            f"{source.path}: has {' and '.join(found)}, which llama.cpp's {architecture} models "
            "do not have; export it as a bundle: stem-edge export CHECKPOINT OUT"
        )
    return architecture


def _obstacles(config: ModelConfig, architecture: str) -> list[str]:
    """Name the parts of a model that the architecture cannot compute."""
    biases = [name for name in config.biases if name not in BIASES[architecture]]
    scaling, norm = config.rope_scaling, config.qk_norm_eps
    by_factors = isinstance(scaling, Llama3Rope) or _own_ramp(scaling)
    found = {
        f"STEM layers {config.stem_layers}": bool(config.stem_layers),
        f"biases of {', '.join(biases)}": bool(biases),
        f"q and k norms of epsilon {norm} beside others of {config.norm_eps}": norm is not None
        and norm != config.norm_eps,
        "norms after attention and FFN": config.post_norms,
        "layers of several kinds": not config.plain,
        f"a logit_softcap of {config.logit_softcap}": config.logit_softcap != 0,
        f"a sliding_window of {config.sliding_window}": any(
            0 < config.window(layer) < config.max_context for layer in range(config.n_layers)
        ),
        "RoPE scaled by factors of its own": architecture == QWEN3 and by_factors,
    }
    return [what for what, there in found.items() if there]


def _metadata(source: Checkpoint, architecture: str, weights: GgufType) -> dict[str, GgufValue]:
    ours = gguf_schema.ARCHITECTURE + "."
    general: dict[str, GgufValue] = {
        "general.architecture": architecture,
        "general.name": source.path.name or "model",
        "general.description": f"exported by stem-edge {stem_edge.__version__}",
        "general.file_type": FILE_TYPES[weights],
        "general.quantization_version": gguf_schema.QUANTIZATION_VERSION,
    }
    return general | {
        architecture + "." + key.removeprefix(ours): value
        for key, value in gguf_schema.model_metadata(source.config).items()
        if key != gguf_schema.CONFIG_KEY
    }


def _rope(config: ModelConfig, architecture: str) -> tuple[dict[str, GgufValue], F32 | None]:
    """Return the keys of RoPE's scaling, and divisors of its frequencies [head_dim / 2] if no key
    can express it."""
    at, scaling = f"{architecture}.rope.scaling.", config.rope_scaling
    match scaling:
        case LinearRope(factor):
            return {at + "type": "linear", at + "factor": float(factor)}, None
        case YarnRope() if not _own_ramp(scaling):
            # Divided out, because llama.cpp multiplies attn_factor by this usual factor.
            usual = 1 + 0.1 * np.log(scaling.factor)
            return {
                at + "type": "yarn",
                at + "factor": float(scaling.factor),
                at + "original_context_length": scaling.original_context,
                at + "attn_factor": float(scaling.attention_factor / usual),
            }, None
        case YarnRope():
            return {at + "attn_factor": float(scaling.attention_factor)}, frequency_factors(
                config.layer(0).rope
            )
        case Llama3Rope():
            return {}, frequency_factors(config.layer(0).rope)
    return {}, None


def _own_ramp(scaling: object) -> bool:
    """Return whether YaRN's ramp differs from llama.cpp's (ends at whole dimensions and YARN_TURNS)."""
    if not isinstance(scaling, YarnRope):
        return False
    return not scaling.truncate or (scaling.beta_fast, scaling.beta_slow) != YARN_TURNS


def _turned(config: ModelConfig, architecture: str, part: str, matrix: Matrix) -> Matrix:
    """Return a tensor with the rows of its heads in the order that the architecture rotates."""
    if part not in ROTATED or config.rope_interleaved == (architecture == LLAMA):
        return matrix
    pairs = np.arange(config.head_dim).reshape((2, -1) if architecture == LLAMA else (-1, 2))
    return head_rows(matrix, pairs.T.ravel())
