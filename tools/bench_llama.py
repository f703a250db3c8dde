"""llama.cpp, through llama-cpp-python, on a dense model of random weights: what bench.py compares with.

The model is written as GGUF in float16 and quantized by llama.cpp itself, once, into a work folder.
Needs `pip install llama-cpp-python gguf`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFWriter
from make_checkpoint import Shape

# name -> (llama.cpp's number of the type, whether every matrix gets it). By default llama.cpp keeps
# the head of a 4-bit model at six bits; "pure" gives it four, as our int4 head has.
TYPES = {
    "Q4_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "Q4_0-pure": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True),
    "Q4_K_M": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, False),
}
BATCH = 512


def make_model(folder: Path, shape: Shape, kind: str, threads: int) -> Path:
    """The quantized GGUF of a shape; made if it is not in the folder yet."""
    path = folder / f"dense-{shape.dim}x{shape.n_layers}-{kind}.gguf"
    if path.is_file():
        return path
    full = folder / f"dense-{shape.dim}x{shape.n_layers}-f16.gguf"
    if not full.is_file():
        _write(full.with_suffix(".part"), shape)
        full.with_suffix(".part").rename(full)
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype, params.pure = TYPES[kind]
    part = path.with_suffix(".part")
    status = llama_cpp.llama_model_quantize(
        str(full).encode(), str(part).encode(), ctypes.byref(params)
    )
    if status:
        raise RuntimeError(f"llama.cpp could not quantize {full} to {kind}: status {status}")
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
            raise RuntimeError(f"llama.cpp cannot load {path}")
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
            raise RuntimeError(f"llama_decode failed with status {status}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self.vocab_size,))


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Takes the log lines that llama.cpp writes while it loads."""


def _silence() -> None:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))


def _write(path: Path, shape: Shape) -> None:
    """A dense model in float16. All matrices are cut from one block of noise: only sizes matter."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_seqlen)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_rope_dimension_count(shape.dim // shape.n_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(shape.vocab_size * shape.dim, np.float32).astype(np.float16)

    def add(name: str, rows: int, columns: int) -> None:
        scale = np.float16(columns**-0.5)
        writer.add_tensor(
            f"{name}.weight", (noise[: rows * columns] * scale).reshape(rows, columns)
        )

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.dim, np.float32))

    kv = shape.dim // shape.n_heads * shape.n_kv_heads
    add("token_embd", shape.vocab_size, shape.dim)
    for layer in range(shape.n_layers):
        at = f"blk.{layer}."
        for name, rows, columns in (
            ("attn_q", shape.dim, shape.dim),
            ("attn_k", kv, shape.dim),
            ("attn_v", kv, shape.dim),
            ("attn_output", shape.dim, shape.dim),
            ("ffn_gate", shape.d_ff, shape.dim),
            ("ffn_up", shape.d_ff, shape.dim),
            ("ffn_down", shape.dim, shape.d_ff),
        ):
            add(at + name, rows, columns)
        add_norm(at + "attn_norm")
        add_norm(at + "ffn_norm")
    add_norm("output_norm")
    add("output", shape.vocab_size, shape.dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
