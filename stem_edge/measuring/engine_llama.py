"""llama.cpp, through llama-cpp-python, on a dense model of random weights: what bench compares with.

The model is written as GGUF in float16 and quantized by llama.cpp itself, once, into a work folder.
Needs pip install 'stem-edge[bench]'.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFWriter
from msgspec.structs import replace

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError

# name -> (llama.cpp's number of the type, whether every matrix gets it). By default llama.cpp keeps
# the head of a 4-bit model at six bits; "pure" gives it four, as our int4 head has.
TYPES = {
    "Q4_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "Q4_0-pure": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True),
    "Q4_K_M": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, False),
}
BATCH = 512
GGUF_NAMES = {
    "embedding": "token_embd",
    "attention_norm": "attn_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "norm": "output_norm",
    "head": "output",
}


def make_model(folder: Path, config: ModelConfig, kind: str, threads: int) -> Path:
    """The quantized GGUF of a dense model of this shape; made if it is not in the folder yet.

    Raises BackendError, OSError.
    """
    sizes = (config.vocab_size, config.dim, config.d_ff, config.n_layers)
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    name = "x".join(str(size) for size in (*sizes, *heads)) + "-tied" * config.tied_head
    path, full = folder / f"dense-{name}-{kind}.gguf", folder / f"dense-{name}-f16.gguf"
    if path.is_file():
        return path
    if not full.is_file():
        _write(full.with_suffix(".part"), config)
        full.with_suffix(".part").rename(full)
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype, params.pure = TYPES[kind]
    part = path.with_suffix(".part")
    status = llama_cpp.llama_model_quantize(
        str(full).encode(), str(part).encode(), ctypes.byref(params)
    )
    if status:
        raise BackendError(f"llama.cpp could not quantize {full} to {kind}: status {status}")
    part.rename(path)
    return path


class LlamaModel:
    """A loaded GGUF that takes token ids and keeps one context."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        _silence()
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise BackendError(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))

    def clear(self) -> None:
        """Empty the context."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def process(self, token_ids: list[int]) -> np.ndarray:
        """Process ids; logits [V] of the last, overwritten by the next call."""
        ids = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        batch = llama_cpp.llama_batch_get_one(ids, len(token_ids))
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise BackendError(f"llama_decode failed with status {status}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self.vocab_size,))


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Takes the log lines that llama.cpp writes while it loads."""


def _silence() -> None:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))


def _write(path: Path, config: ModelConfig) -> None:
    """A dense model in float16. All matrices are cut from one block of noise: only sizes matter."""
    writer = GGUFWriter(path, "llama")
    _describe(writer, config)
    twin = replace(config.dense_twin(), biases=(), qk_norm_eps=None, post_norms=False)
    shapes = twin.backbone_shapes()
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    largest = max(rows * columns for rows, columns in matrices)
    noise = np.random.default_rng(0).standard_normal(largest, np.float32).astype(np.float16)
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
        else:
            scale = np.float16(shape[-1] ** -0.5)
            values = (noise[: shape[0] * shape[1]] * scale).reshape(shape)
        writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _gguf_name(name: str) -> str:
    """Of a backbone tensor."""
    if not name.startswith("layers."):
        return f"{GGUF_NAMES[name]}.weight"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
