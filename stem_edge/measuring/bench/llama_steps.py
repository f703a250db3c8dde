"""Steps of llama.cpp with several tokens: of several sequences, or of guesses that are verified.

Answers are those of given texts: logits are computed and their greatest is looked up, but the text's
token is taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from stem_edge.measuring.bench.together import Guessed, Text, Together
from stem_edge.runtime.text.codec import same_start

if TYPE_CHECKING:
    from stem_edge.measuring.bench.engine_llama import LlamaModel


class Input(NamedTuple):
    """A token of a step."""

    token: int
    position: int
    sequence: int = 0
    logits: bool = True  # whether they are wanted


class Steps:
    """Runs steps of up to `size` tokens; a context manager, which frees their arrays."""

    def __init__(self, model: LlamaModel, size: int) -> None:
        self._model, self._batch = model, llama_cpp.llama_batch_init(size, 0, 1)

    def run(self, inputs: Sequence[Input]) -> list[int]:
        """Compute tokens; return the most probable next one after each whose logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(inputs)
        for at, one in enumerate(inputs):
            batch.token[at], batch.pos[at], batch.logits[at] = one.token, one.position, one.logits
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, one.sequence
        self._model.decode(batch)
        wanted = (at for at, one in enumerate(inputs) if one.logits)
        return [int(self._model.logits(at).argmax()) for at in wanted]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self._batch)


def prompt_inputs(prompt: Sequence[int], sequence: int = 0) -> list[Input]:
    """Return a prompt, of which only the last token's logits are wanted."""
    last = len(prompt) - 1
    return [Input(token, at, sequence, at == last) for at, token in enumerate(prompt)]


def decode_together(model: LlamaModel, texts: list[Text], count: int) -> Together:
    """Run `count` sequences, and one that joins them, as stem_edge.measuring.bench.together says.

    A prompt is computed in one step with the tokens of the others, as llama.cpp's server does.
    """
    for text in texts:
        model.check([*text.prompt, *text.answer])
    model.clear()
    run, short = Together(count), count - 1
    with Steps(model, max(len(text.prompt) for text in texts) + count) as steps:
        sequences = _Sequences(steps, texts, run)
        for sequence in range(count):
            sequences.step(list(range(sequence)), sequence, sequence)
        for _ in texts[short].answer[1:]:
            sequences.step(list(range(count)))
        if short:
            model.rewind(-1, short)
            sequences.step(list(range(short)), count, short)
    return run


class _Sequences:
    """Sequences and how many tokens of each answer were chosen."""

    def __init__(self, steps: Steps, texts: list[Text], run: Together) -> None:
        self._steps, self._texts, self._run = steps, texts, run
        self._chosen = [0] * len(texts)

    def step(self, decoding: list[int], begins: int | None = None, place: int = 0) -> None:
        """Compute a token of those that decode, and the prompt of one that begins in a place."""
        inputs = [self._input(sequence) for sequence in decoding]
        if begins is not None:
            inputs += prompt_inputs(self._texts[begins].prompt, place)
        self._steps.run(inputs)
        for sequence in [*decoding, *([] if begins is None else [begins])]:
            self._run.chosen(sequence, self._texts[sequence].answer[self._chosen[sequence]])
            self._chosen[sequence] += 1

    def _input(self, sequence: int) -> Input:
        text, last = self._texts[sequence], self._chosen[sequence] - 1
        return Input(text.answer[last], len(text.prompt) + last, sequence)


def decode_guessing(model: LlamaModel, text: Text, drafts: int) -> Guessed:
    """Decode an answer with llama-cpp-python's guesses from the text so far, `drafts` at a time."""
    model.check([*text.prompt, *text.answer])
    model.clear()
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=max(1, drafts))
    ids, begin = np.array([*text.prompt, *text.answer], np.intc), len(text.prompt)
    drafted = accepted = 0
    with Steps(model, max(begin, drafts + 1)) as steps:
        own = steps.run(prompt_inputs(text.prompt))
        started, at = time.perf_counter(), begin  # of the next token that is computed
        while at + 1 < len(ids):
            guessed = lookup(ids[: at + 1]).tolist() if drafts else []
            guessed = guessed[: len(ids) - at - 2]  # the last token of the answer is not computed
            tokens = [int(ids[at]), *guessed]
            best = steps.run([Input(token, at + after) for after, token in enumerate(tokens)])
            right = same_start(guessed, ids[at + 1 :].tolist())
            drafted, accepted, at = drafted + len(guessed), accepted + right, at + 1 + right
            own += best[: right + 1]
            if right < len(guessed):
                model.rewind(at - 1)
    return Guessed(time.perf_counter() - started, drafted, accepted, own)
