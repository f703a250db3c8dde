"""Texts of single tokens, and their log probabilities in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import TokenLogprobs

CACHED_TOKENS = 1 << 14


class TokenTexts:
    """Caches texts and bytes of single tokens: log probabilities need up to 21 tokens a step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        # Decoders of some tokenizers drop the space before the first token.
        self._before = model.tokenize("a", add_special_tokens=False)
        self._start = len(model.detokenize(self._before))
        self._token = lru_cache(CACHED_TOKENS)(self._read)

    def _read(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """Return a token's text, decoded after another token so that spaces stay, and its bytes."""
        text = self._model.detokenize([*self._before, token_id], skip_special_tokens=False)
        return text[self._start :], tuple(self._model.token_bytes(token_id))

    def chat_logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return log probabilities as OpenAI's chat completions write them."""
        content = [
            self._entry(each.token_id, each.logprob)
            | {"top_logprobs": [self._entry(*top) for top in each.top]}
            for each in found
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, values = self._token(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": values}

    def logprobs(self, found: Sequence[TokenLogprobs | int], offset: int) -> dict[str, Any]:
        """Return log probabilities as OpenAI's completions write them.

        found: log probabilities of each token, but only the id of the first token of a prompt.
        offset: number of characters before these tokens.
        """
        ids = [each if isinstance(each, int) else each.token_id for each in found]
        tokens, offsets = [self._token(token_id)[0] for token_id in ids], list[int]()
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if isinstance(e, int) else _finite(e.logprob) for e in found],
            "top_logprobs": [None if isinstance(e, int) else self._top(e) for e in found],
            "text_offset": offsets,
        }

    def _top(self, each: TokenLogprobs) -> Mapping[str, float]:
        """Return token text -> log probability, for the top tokens and the chosen token."""
        top = [*each.top, (each.token_id, each.logprob)]
        return {self._token(token_id)[0]: _finite(logprob) for token_id, logprob in reversed(top)}


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI writes this for -inf, which JSON lacks
