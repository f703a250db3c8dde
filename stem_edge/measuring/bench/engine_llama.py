"""llama.cpp on a GGUF file, through llama-cpp-python, for bench --against.

Steps may have several tokens: of several sequences, or of guesses that are verified. Answers are those
of given texts: logits are computed and their greatest is looked up, but the text's token is taken.
Needs pip install 'stem-edge[bench]'.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from stem_edge.errors import BackendError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.types import TensorType
from stem_edge.measuring.bench.together import FollowedText, Guessed, Together
from stem_edge.measuring.bench.worker import MeasuredEngine
from stem_edge.runtime.text.codec import same_start

BATCH = 512


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
        """Fill the context up to this many tokens with copies of the processed ones.

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

    def together(self, texts: list[FollowedText], count: int) -> Together:
        return decode_together(self, texts, count)

    def guess(self, text: FollowedText, drafts: int) -> Guessed:
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


class Input(NamedTuple):
    """A token of a step."""

    token: int
    position: int
    sequence: int = 0
    logits: bool = True  # whether they are wanted


class LlamaSteps:
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
    """Return a prompt; only its last token needs logits."""
    last = len(prompt) - 1
    return [Input(token, at, sequence, at == last) for at, token in enumerate(prompt)]


def decode_together(model: LlamaModel, texts: list[FollowedText], count: int) -> Together:
    """Run `count` sequences, and one that joins them, as stem_edge.measuring.bench.together says.

    A prompt is computed in one step with the tokens of the others, as llama.cpp's server does.
    """
    for text in texts:
        model.check([*text.prompt, *text.answer])
    model.clear()
    run, short = Together(count), count - 1
    with LlamaSteps(model, max(len(text.prompt) for text in texts) + count) as steps:
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

    def __init__(self, steps: LlamaSteps, texts: list[FollowedText], run: Together) -> None:
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


def decode_guessing(model: LlamaModel, text: FollowedText, drafts: int) -> Guessed:
    """Decode an answer with llama-cpp-python's guesses from the text so far, `drafts` at a time."""
    model.check([*text.prompt, *text.answer])
    model.clear()
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=max(1, drafts))
    ids, begin = np.array([*text.prompt, *text.answer], np.intc), len(text.prompt)
    drafted = accepted = 0
    with LlamaSteps(model, max(begin, drafts + 1)) as steps:
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
