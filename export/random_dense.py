"""Dense models of random weights as GGUF files, to compare with llama.cpp where only sizes matter.

ggml's own functions quantize them into llama.cpp's mixtures of types, once, in a work folder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.export.backbone.gguf_llama import write_dense
from stem_edge.export.backbone.gguf_writer import GgufValue
from stem_edge.export.checkpoints.checkpoint import Checkpoint, SourceMatrix, TokenizerSource
from stem_edge.export.dense_gguf import publish_file
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_schema import tensor_types
from stem_edge.ggml.library import open_ggml
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import GgufType
from stem_edge.numerics.matrix import ArrayMatrix

# Name -> mixture of tensor types, and the one type of all matrices if they are not mixed.
# "pure" is there because llama.cpp keeps the head of a 4-bit model at six bits by default, while our
# int4 head has four.
TYPES: dict[str, tuple[GgufType, TensorType | None]] = {
    "Q4_0": ("q4_0", None),
    "Q4_0-pure": ("q4_0", ggml_types.Q4_0),
    "Q4_K_M": ("q4_k_m", None),
    "Q5_K_M": ("q5_k_m", None),
    "Q6_K": ("q6_k", None),
    "Q8_0": ("q8_0", None),
    "F16": ("f16", None),
}
USUAL = ("Q4_0", "Q4_0-pure", "Q4_K_M")  # if no type is asked for


def random_dense(folder: Path, config: ModelConfig, kind: str, threads: int) -> Path:
    """Return the quantized GGUF of a dense model of this shape; write it unless it is there.

    Raises BackendError, ExportError.
    """
    if not config.plain:
        raise BackendError("llama.cpp models are made for STEM layers, and this model has others")
    sizes = (config.vocab_size, config.dim, config.d_ff, config.n_layers)
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    name = "x".join(str(size) for size in (*sizes, *heads)) + "-tied" * config.tied_head
    path = folder / f"dense-{name}-{kind}.gguf"
    if path.is_file():
        return path
    source, (weights, pure) = _random(config), TYPES[kind]
    types = tensor_types(source.config, weights)
    if pure is not None:
        # The mixture has chosen float16 where a row cannot be cut into blocks: keep that.
        types = {name: type if type.block == 1 else pure for name, type in types.items()}
    tokenizer: dict[str, GgufValue] = {"tokenizer.ggml.model": "no_vocab"}
    with publish_file(path, force=False) as part:
        write_dense(part, open_ggml(), source, weights, tokenizer, types=types, threads=threads)
    return path


class _Repeated(ArrayMatrix):
    """A matrix that repeats one row, which takes no memory: only sizes matter here."""

    nbytes = 0


def _random(config: ModelConfig) -> Checkpoint:
    """Return a dense model of this shape, without the parts that llama.cpp cannot compute."""
    config = replace(
        config.dense_twin(),
        biases=(),
        qk_norm_eps=None,
        post_norms=False,
        logit_softcap=0.0,
        sliding_window=0,
        window_layers=None,
        rope_scaling=None,
    )
    shapes, random = config.backbone_shapes(), np.random.default_rng(0)
    noise = random.standard_normal(max(shape[-1] for shape in shapes.values()), np.float32)
    tensors: dict[str, SourceMatrix] = {
        name: _Repeated(np.broadcast_to(noise[: shape[-1]] * np.float32(shape[-1] ** -0.5), shape))
        for name, shape in shapes.items()
    }
    return Checkpoint(Path("random"), config, tensors, {}, TokenizerSource("bytes", None, None))
