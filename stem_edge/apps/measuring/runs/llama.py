"""llama.cpp for measurements, through llama-cpp-python: a prompt, then one token at a time.

Needs pip install 'stem-edge[bench]'.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

from stem_edge.errors import BackendError

BATCH = 512


class LlamaModel:
    """A loaded GGUF file with one context; both are freed when the process ends.

    lazy: True: read rows of per-layer embeddings when they are needed; False: load all rows. Default:
        llama.cpp decides by their size.
    repack: rearrange weights for this processor, which copies them to anonymous memory.
    """

    def __init__(
        self,
        path: str | Path,
        context: int,
        threads: int,
        *,
        lazy: bool | None = None,
        repack: bool = True,
    ) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        if lazy is not None:
            on, off = llama_cpp.LLAMA_LAZY_MODE_ON, llama_cpp.LLAMA_LAZY_MODE_OFF
            model_params.lazy_mode = on if lazy else off
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not model:
            raise BackendError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        # A batch must hold a whole prompt, because llama.cpp aborts if a call passes more tokens.
        params.n_ctx, params.n_batch, params.n_ubatch = context, context, BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise BackendError(f"llama.cpp cannot make a context of {context} tokens for {path}")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))

    def clear(self) -> None:
        """Empty the KV cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def choose(self, token_ids: list[int]) -> int:
        """Append ids to the context, and return the most probable next token."""
        if (greatest := max(token_ids)) >= self.vocab_size:  # llama.cpp would abort the process
            raise BackendError(
                f"token id {greatest} is out of range; llama.cpp's model has 0 to "
                f"{self.vocab_size - 1}: compare models with the same tokenizer"
            )
        ids = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        batch = llama_cpp.llama_batch_get_one(ids, len(token_ids))
        if status := llama_cpp.llama_decode(self._context, batch):
            raise BackendError(f"llama_decode failed with status {status}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Log callback for llama.cpp that ignores all messages."""
