"""Checks of what a model is asked to continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.row_ids import check_text, checked_ids
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.text.codec import TextCodec, shorten


class Prompts(NamedTuple):
    """Makes token ids of prompts for contexts of `context_length` tokens."""

    codec: TextCodec
    config: ModelConfig
    context_length: int

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text, or given ones. Raises InputError."""
        if isinstance(prompt, str):
            return self.checked(
                self.codec.encode_prompt(prompt, self.context_length, self.config.max_context)
            )
        return self.checked(prompt)

    def checked(self, token_ids: Sequence[int]) -> list[int]:
        """Return ids unchanged. Raises InputError for none, too many, or some out of range."""
        ids = checked_ids(token_ids, self.config.vocab_size)
        if not ids:
            raise InputError("the prompt is empty; give at least one token id")
        check_text(self.config, ids)
        if len(ids) > self.context_length:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_length}; "
                f"{shorten(self.context_length, self.config.max_context)}"
            )
        return ids

    def length(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Return the tokens of prompt and answer that a context must hold.

        Raises InputError for biases of tokens that the model does not have.
        """
        if params.logit_bias:
            checked_ids(list(params.logit_bias), self.config.vocab_size)
        # The last token is handed out but never processed, so it takes no place in the context.
        return min(self.context_length, len(prompt) + params.max_new_tokens - 1)
