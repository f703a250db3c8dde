"""Gives llguidance a bundle's tokenizer: the bytes of each token, and how text is tokenized."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.library import library
from stem_edge.runtime.text.codec import TextCodec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SAMPLE = "a b"
# Many tokenizers put a space before a text. After this character, no tokenizer adds a space.
BEGIN = "\x02"
MAX_TOKEN = 64  # bytes
# Most characters of a forced text to tokenize in one call. The codec may refuse longer texts, such as those of
# the regex a{1000000}, and an error here is a panic of llguidance, which leaks 40 MB.
MAX_SPLIT = 4096


class _Tokens:
    """Implements llguidance's tokenizer interface. Grammars must name the special tokens they allow."""

    bos_token_id = None

    def __init__(self, codec: TextCodec, eos_ids: Collection[int], vocab_size: int) -> None:
        self._codec, self.eos_token_id = codec, min(eos_ids)
        self.tokens = codec.every_token(vocab_size)
        special = codec.special_ids(())
        self.special_token_ids = sorted(special)
        self._ids = {token: n for n, token in enumerate(self.tokens) if n not in special}
        self._begin = ""
        if not self._splits(SAMPLE):
            self._begin = BEGIN
        if not self._splits(SAMPLE):
            raise InputError(
                "this bundle's tokenizer joins tokens by spaces or other rules, so that they have no bytes "
                "of their own, which structured output needs; generate without schema, regex and grammar"
            )

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("bytes")  # so that llguidance gives texts
        text = text[:MAX_SPLIT]
        return self._splits(text) or self._longest(text.encode())

    def _splits(self, text: str) -> list[int]:
        """Return the token ids of a text; [] if the bytes of these tokens are not the text."""
        before = len(self._encoded(self._begin))
        ids = self._encoded(self._begin + text)[before:]
        joined = b"".join(self.tokens[token_id] for token_id in ids)
        return ids if joined == text.encode() else []

    def _encoded(self, text: str) -> list[int]:
        return self._codec.encode(text, add_special_tokens=False, special_tokens_in_text=False)

    def _longest(self, text: bytes) -> list[int]:
        """Split bytes greedily into the longest tokens, left to right; stop where no token matches."""
        ids, at = list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + MAX_TOKEN), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def vocabulary_of(codec: TextCodec, eos_ids: Collection[int], vocab_size: int) -> LLTokenizer:
    """Return a bundle's vocabulary of `vocab_size` ids in the form that llguidance needs.

    eos_ids: tokens that end an answer. Raises InputError if eos_ids is empty, or if the bytes of
    a text's tokens, joined, are not the bytes of the text.
    """
    if not eos_ids:  # llguidance would guess one
        raise InputError(
            "this bundle names no token that ends an answer, which structured output needs; generate "
            "without schema, regex and grammar"
        )
    module = library()
    tokens = module.TokenizerWrapper(_Tokens(codec, eos_ids, vocab_size))
    made = module.LLTokenizer(tokens, n_vocab=vocab_size, eos_token=list(eos_ids))
    return cast("LLTokenizer", made)
