"""Tasks of four kinds of text: a prompt each, and what a good model answers.

They stand for what a model would say: random weights say nothing that could be guessed, and different
models would not be measured on the same text.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.measuring.workload import DEFAULT_TEXT, NEW_TOKENS, make_workload
from stem_edge.runtime.text.codec import TextCodec

FOLDER = Path(__file__).with_name("texts")
TOLD = 3  # paragraphs of the default text that are the prompt of "prose"
KINDS = ("copying", "code", "chat", "prose")
MARK = re.compile(r"^### (?:prompt|answer)\n", re.MULTILINE)
# Vocabularies from here on have words as tokens. Of one that has bytes instead, as random weights do,
# ids from FIRST_WORD on stand for words.
WORDS_FROM, FIRST_WORD = 1 << 15, 1 << 10
PIECE = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")


class Task(NamedTuple):
    """A prompt, and the answer that is followed."""

    kind: str
    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> int:
        """Number of tokens, for which the context must have room."""
        return len(self.prompt) + len(self.answer)


def read_tasks(
    bundle: Bundle,
    text: str | Path | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    context_length: int | None = None,
) -> list[Task]:
    """Return the tasks of all kinds, or one of a file, see make_workload.

    prompt_tokens: the last ones, if not all; new_tokens: the first ones of each answer (default:
    128). Both give way to the context. Raises InputError.
    """
    context = bundle.manifest.model.max_context if context_length is None else context_length
    if text is not None:
        work = make_workload(bundle, text, prompt_tokens, new_tokens, context_length)
        return [Task(Path(text).name, work.prompt, work.following)]
    new = min(NEW_TOKENS if new_tokens is None else new_tokens, context // 2)
    most = context - new if prompt_tokens is None else min(prompt_tokens, context - new)
    if new < 1 or most < 1:
        raise InputError(
            f"prompts of {most} tokens and answers of {new} are asked for; expected at least 1 of "
            f"each, and together no more than the {context} of the context"
        )
    ids = Ids(TextCodec(bundle.file(TOKENIZER)), bundle.manifest.model.vocab_size)
    return [
        Task(kind, ids.of(prompt, begin=True)[-most:], ids.of(answer)[:new])
        for kind in KINDS
        for prompt, answer in _texts(kind)
    ]


def _texts(kind: str) -> Iterator[tuple[str, str]]:
    """Yield prompts and answers of a kind."""
    if kind == "prose":
        paragraphs = DEFAULT_TEXT.read_text("utf-8").splitlines(keepends=True)
        at = 2 * TOLD  # every other line is empty
        yield "".join(paragraphs[:at]), "".join(paragraphs[at:])
        return
    _, *pieces = MARK.split((FOLDER / f"{kind}.txt").read_text("utf-8"))
    yield from zip(pieces[::2], pieces[1::2], strict=True)


class Ids:
    """Token ids of texts, by a tokenizer or by words."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        self._codec, self._vocab_size = codec, vocab_size
        letters = codec.encode("words", add_special_tokens=False)
        self._by_words = len(letters) == len("words") and vocab_size >= WORDS_FROM

    def of(self, text: str, *, begin: bool = False) -> list[int]:
        """Return ids; begin: after the begin-of-text token if the model was trained with it."""
        if not self._by_words:
            return self._codec.encode(text, add_special_tokens=begin)
        words = self._vocab_size - FIRST_WORD
        return [FIRST_WORD + zlib.crc32(word.encode()) % words for word in PIECE.findall(text)]
