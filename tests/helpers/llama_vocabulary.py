"""Vocabularies of GGUF files, as llama.cpp opens them and cuts texts by them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Encode = Callable[[str, bool], list[int]]


class Vocabulary(NamedTuple):
    """Tokens of a file, and encode(text, as a whole text)."""

    size: int
    encode: Encode


@contextmanager
def vocabularies() -> Iterator[Callable[[Path], Vocabulary]]:
    """Lend a function that opens files; skips where llama.cpp is not installed."""
    llama_cpp = pytest.importorskip("llama_cpp")
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    models: list[Any] = []

    def opened(path: Path) -> Vocabulary:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        models.append(llama_cpp.llama_model_load_from_file(str(path).encode(), params))
        assert models[-1]
        vocabulary = llama_cpp.llama_model_get_vocab(models[-1])

        def encode(text: str, add: bool) -> list[int]:
            data = text.encode()
            ids = (llama_cpp.llama_token * (len(data) + 8))()
            count = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, len(ids), add, True)
            assert count >= 0
            return list(ids[:count])

        return Vocabulary(llama_cpp.llama_vocab_n_tokens(vocabulary), encode)

    yield opened
    for model in models:
        llama_cpp.llama_model_free(model)
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), ctypes.c_void_p(0))
