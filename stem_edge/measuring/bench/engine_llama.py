"""llama.cpp, through llama-cpp-python, for bench --against: on a GGUF file, or on random weights.

For a dense model of random weights, ggml's own functions quantize the model into llama.cpp's
mixtures of types, once, in a work folder.
Needs pip install 'stem-edge[bench]'.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
from msgspec.structs import replace

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import GgufType
from stem_edge.measuring.bench.together import Guessed, Text, Together
from stem_edge.measuring.bench.worker import MeasuredEngine
from stem_edge.numerics.matrix import ArrayMatrix

if TYPE_CHECKING:
    from stem_edge.export.checkpoints.checkpoint import Checkpoint


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
BATCH = 512


def make_model(folder: Path, config: ModelConfig, kind: str, threads: int) -> Path:
    """Return the quantized GGUF of a dense model of this shape; write it unless it is there.

    Raises BackendError, ExportError.
    """
    from stem_edge.export.backbone.gguf_llama import write_dense
    from stem_edge.export.backbone.gguf_writer import GgufValue
    from stem_edge.export.dense_gguf import publish_file
    from stem_edge.ggml.gguf_schema import tensor_types
    from stem_edge.ggml.library import open_ggml

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


class LlamaModel(MeasuredEngine):
    """A loaded GGUF with one context, freed with the last reference.

    exact: keep keys and values in float32 instead of llama.cpp's default, float16.
    kv_type: keep them in this type, with llama.cpp's fused attention. sequences: texts at a time,
    which share the context, or have one each. unified: their keys and values lie in one cache, which
    is for texts that begin alike.
    lazy: read rows of per-layer embeddings when they are needed, or load all of them. Default: as
        llama.cpp does without being asked, which depends on their size.
    repack: rearrange weights for this processor, in memory that belongs to no file.
    """

    def __init__(
        self,
        path: str | Path,
        context: int,
        threads: int,
        *,
        exact: bool = False,
        lazy: bool | None = None,
        repack: bool = True,
        kv_type: TensorType | None = None,
        sequences: int = 1,
        each: bool = False,
        unified: bool = True,
    ) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        if lazy is not None:
            on, off = llama_cpp.LLAMA_LAZY_MODE_ON, llama_cpp.LLAMA_LAZY_MODE_OFF
            model_params.lazy_mode = on if lazy else off
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise BackendError(f"llama.cpp cannot load {path}")
        weakref.finalize(self, llama_cpp.llama_model_free, self._model)
        params = llama_cpp.llama_context_default_params()
        room = context * sequences if each else context
        # A batch must hold a whole prompt, because llama.cpp aborts if a call passes more tokens.
        params.n_ctx, params.n_batch, params.n_ubatch = room, room, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = sequences, unified
        if kv_type is not None:
            params.type_k = params.type_v = kv_type.number
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if exact:
            params.type_k = params.type_v = ggml_types.F32.number
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise BackendError(f"llama.cpp cannot make a context of {room} tokens for {path}")
        # Finalizers run in reverse order: the context must go before its model.
        weakref.finalize(self, llama_cpp.llama_free, self._context)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def fill(self, tokens: int) -> None:
        """Fill the context with so many tokens, by copies of those that were processed.

        The copies keep their positions, which costs attention no less. Needs a second sequence.
        """
        memory, size = llama_cpp.llama_get_memory(self._context), self.last + 1
        nbytes = llama_cpp.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * nbytes)()
        llama_cpp.llama_state_seq_get_data(self._context, state, nbytes, 0)
        for start in range(size, tokens, size):
            if not llama_cpp.llama_state_seq_set_data(self._context, state, nbytes, 1):
                raise BackendError(f"llama.cpp has no room for {size} more tokens after {start}")
            llama_cpp.llama_memory_seq_rm(memory, 1, tokens - start, -1)
            llama_cpp.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)

    @property
    def last(self) -> int:
        """Position of the last token."""
        memory = llama_cpp.llama_get_memory(self._context)
        return int(llama_cpp.llama_memory_seq_pos_max(memory, 0))

    def rewind(self, last: int, sequence: int = 0) -> None:
        """Forget all tokens of a sequence after this position, -1: all."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, sequence, last + 1, -1)

    def together(self, texts: list[Text], count: int) -> Together:
        from stem_edge.measuring.bench.llama_steps import decode_together

        return decode_together(self, texts, count)

    def guess(self, text: Text, drafts: int) -> Guessed:
        from stem_edge.measuring.bench.llama_steps import decode_guessing

        return decode_guessing(self, text, drafts)

    def choose(self, token_ids: list[int]) -> int:
        return int(self.process(token_ids).argmax())

    def process(self, token_ids: list[int]) -> np.ndarray:
        """Process ids and return the logits [V] of the last; the next call overwrites them."""
        self.check(token_ids)
        ids = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        self.decode(llama_cpp.llama_batch_get_one(ids, len(token_ids)))
        return self.logits(-1)

    def check(self, token_ids: Iterable[int]) -> None:
        """Raise BackendError for ids that would end the process."""
        if (greatest := max(token_ids)) >= self.vocab_size:
            raise BackendError(
                f"token id {greatest} is out of range; llama.cpp's model has 0 to "
                f"{self.vocab_size - 1}: compare models with the same tokenizer"
            )

    def decode(self, batch: llama_cpp.llama_batch) -> None:
        """Compute the tokens of a batch. Raises BackendError."""
        if status := llama_cpp.llama_decode(self._context, batch):
            raise BackendError(f"llama_decode failed with status {status}")

    def logits(self, at: int) -> np.ndarray:
        """Return the logits [V] of a token of the last batch, -1: the last."""
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        return np.ctypeslib.as_array(logits, (self.vocab_size,))


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop a line of llama.cpp's log."""


class _Repeated(ArrayMatrix):
    """A matrix that repeats one row, which takes no memory: only sizes matter here."""

    nbytes = 0


def _random(config: ModelConfig) -> Checkpoint:
    """Return a dense model of this shape, without the parts that llama.cpp cannot compute."""
    from stem_edge.export.checkpoints.checkpoint import Checkpoint, SourceMatrix, TokenizerSource

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
