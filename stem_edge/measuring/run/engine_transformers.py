"""A Hugging Face checkpoint in torch bfloat16, as transformers runs it, for bench --against."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from stem_edge.measuring.run.worker import MeasuredEngine


class TransformersModel(MeasuredEngine):
    """A loaded checkpoint with one context, whose KV cache grows with its tokens."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, local_files_only=True
        )
        self._cache: Any = None

    def clear(self) -> None:
        self._cache = None

    @torch.inference_mode()
    def choose(self, token_ids: list[int]) -> int:
        ids = torch.tensor([token_ids])
        done = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = done.past_key_values
        return int(done.logits[0, -1].argmax())
