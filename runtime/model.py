"""The model a user holds: text or token ids in, text, token ids or logits out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, Unpack

import numpy as np

from stem_edge.bundle.manifest import TOKENIZER_CONFIG, Bundle
from stem_edge.config import ModelConfig
from stem_edge.edits.file import Edit
from stem_edge.edits.folder import as_edit
from stem_edge.errors import InputError, UnknownOptionError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import LESS_MEMORY
from stem_edge.runtime.backends.plan import MemoryPlan
from stem_edge.runtime.engine import Context, Engine
from stem_edge.runtime.lookups.overlay import Lookups, Overlay
from stem_edge.runtime.lookups.row_ids import StemId, check_text, checked_ids, given_lookups
from stem_edge.runtime.sampling import (
    SamplingOptions,
    SamplingParams,
    TokenLogprobs,
    make_sampler,
    needed_logits,
    token_logprobs,
)
from stem_edge.runtime.stats import GenerationStats, Recorder
from stem_edge.runtime.text.chat import Chat, Messages
from stem_edge.runtime.text.codec import TextCodec, TokenStream, shorten
from stem_edge.system.memory import raise_out_of_memory

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """A piece of generated text with the tokens it came from.

    Texts of all chunks joined are the generated text. The token that ended a generation is among
    the ids, its text is not.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one a token, if they were asked for
    finish_reason: FinishReason | None  # on the last chunk: "stop", or "length" when room ran out


class Model:
    """A loaded bundle. Use it as a context manager, or call close().

    One generation at a time is what the memory plan counts; several may take turns, in one thread
    or in many. A forked process cannot use it. OutOfMemoryError from any call leaves it usable.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        plan: MemoryPlan,
        text: TextCodec,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.bundle, self.plan = bundle, plan
        # Of the latest call of generate or logits; of several at once, rows of all are in it.
        self.stats = GenerationStats.planned(plan)
        self.engine = engine  # for those who measure, or feed tokens of their own
        self._text, self._on_close = text, on_close
        self._chat = Chat(bundle.file(TOKENIZER_CONFIG), text)
        # Of each `edited` that is open, in their order; threads add and remove their own.
        self._edits: dict[object, tuple[Edit, ...]] = {}
        self._overlay = Overlay(text, bundle.manifest.model)
        self._closed = False

    @property
    def config(self) -> ModelConfig:
        """The model description."""
        return self.bundle.manifest.model

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        special_tokens_in_text: bool = False,
    ) -> list[int]:
        """Token ids of a text, begin-of-text included if the model was trained with it.

        special_tokens_in_text: whether names of special tokens in the text mean these tokens, as
        in what chat_prompt makes; by default they are text like any other.
        """
        return self._text.encode(
            text,
            add_special_tokens=add_special_tokens,
            special_tokens_in_text=special_tokens_in_text,
        )

    def chat_prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        special_tokens_in_text: bool = False,
    ) -> str:
        """The text of a conversation, by the bundle's chat template; see stem_edge.runtime.text.chat.

        Its tokens: tokenize(text, add_special_tokens=False, special_tokens_in_text=True).
        """
        return self._chat.prompt(
            messages, add_generation_prompt, special_tokens_in_text=special_tokens_in_text
        )

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._text.decode(self._checked(token_ids), skip_special_tokens=skip_special_tokens)

    @contextmanager
    def edited(self, *edits: Edit | str | Path) -> Iterator[Self]:
        """`with model.edited(edit):` calls of generate and logits in it look up what edits say.

        edits: stem_edge.make_edit's, or names or paths of files; stacked in their order, and on those
        of a context around this one. Rows that edits look up are always the bundle's own; where two
        edits change the same row (place or token, and layer), the later one holds. A call keeps the
        edits that it began with: a generation that began before goes on without them, and one that
        begins within, in whichever thread, ends with them. Of several edits at positions, one at
        least must have its source in the prompt.

        Raises EditError for a file that is none or was made for another bundle, InputError for an
        edit that cannot be applied.
        """
        self.engine.check_usable()
        entry = tuple(as_edit(self.bundle, edit) for edit in edits)
        Overlay(self._text, self.config, entry)
        key = object()
        self._edits[key] = entry
        try:
            yield self
        finally:
            del self._edits[key]

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that a call which begins now has, in their order."""
        return tuple(edit for entry in list(self._edits.values()) for edit in entry)

    def _lookups(self, prompt: list[int], stem_ids: Sequence[StemId] | None) -> Lookups:
        """What a call that begins now looks up."""
        edits, overlay = self.edits, self._overlay
        if edits != overlay.edits:
            overlay = self._overlay = Overlay(self._text, self.config, edits)
        given = None
        if stem_ids is not None:
            given = given_lookups(self.config, stem_ids, len(prompt))
        return Lookups(self.engine, overlay, prompt, given)

    def logits(self, token_ids: Sequence[int], *, stem_ids: Sequence[StemId] | None = None) -> F32:
        """Logits float32 [T, V] of every position, from an empty context.

        stem_ids: see generate. Raises InputError for ids out of range, none, or more than the
        context holds.
        """
        ids = self._checked_prompt(token_ids)
        try:
            logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        except MemoryError as error:
            raise_out_of_memory(error, "for logits", "take logits_chunks, or a shorter text")
        filled = 0
        for piece in self._logits_chunks(ids, self._lookups(ids, stem_ids)):
            logits[filled : filled + len(piece)] = piece
            filled += len(piece)
        return logits

    def logits_chunks(
        self, token_ids: Sequence[int], *, stem_ids: Sequence[StemId] | None = None
    ) -> Iterator[F32]:
        """What `logits` returns, in pieces [n, V] in order: all of them can be too much memory.

        The next piece overwrites the last one. Raises InputError at once, as `logits` does.
        """
        ids = self._checked_prompt(token_ids)
        return self._logits_chunks(ids, self._lookups(ids, stem_ids))

    def _logits_chunks(self, ids: list[int], lookups: Lookups) -> Iterator[F32]:
        try:
            context = self.engine.open_context(len(ids))
            with self._recorder() as record, lookups:
                yield from self.engine.process(context, ids, lookups.prompt, every=True)
                record.prefilled(len(ids))
        except MemoryError as error:
            raise_out_of_memory(error, "for logits", LESS_MEMORY)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stem_ids: Sequence[StemId] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Continue a text or token ids, chunk by chunk as soon as text is certain.

        Options are the fields of SamplingParams: max_new_tokens, temperature (0 is greedy), top_k,
        top_p, min_p, repetition_penalty, stop, seed, logprobs. top_k, top_p and min_p without a
        temperature sample at temperature 1.

        stem_ids: for each token of the prompt, whose rows it looks up in the tables: a token id, or
        several ids for the mean of their rows. The prompt's own ids are the default; given, they
        are the bundle's rows as they are, and edits (see edited) hold for generated tokens only.

        Raises InputError at once for a bad option or prompt, RowReadError while iterating when
        flash fails.
        """
        if params is not None and options:
            raise InputError("give either params or single options, not both")
        if unknown := options.keys() - SamplingOptions.__annotations__.keys():
            known = ", ".join(SamplingOptions.__annotations__)
            raise UnknownOptionError(f"there is no option {min(unknown)}; expected some of {known}")
        params = params or SamplingParams(**options)
        if isinstance(prompt, str):
            prompt = self._text.encode_prompt(
                prompt, self.plan.context_length, self.config.max_context
            )
        ids = self._checked_prompt(prompt)
        return self._generate(ids, params, self._lookups(ids, stem_ids))

    def generate_text(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stem_ids: Sequence[StemId] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> str:
        """The whole generated text; takes what generate takes."""
        chunks = self.generate(prompt, params, stem_ids=stem_ids, **options)
        return "".join(chunk.text for chunk in chunks)

    def _generate(
        self, prompt: list[int], params: SamplingParams, lookups: Lookups
    ) -> Iterator[Chunk]:
        """What _tokens gives, as text; an allocation that fails ends it."""
        stream = TokenStream(self._text, params.stop)
        sampled: list[int] = []  # tokens since the last chunk
        logprobs: list[TokenLogprobs] = []
        try:
            for token, logprob, reason in self._tokens(prompt, params, lookups):
                sampled.append(token)
                if logprob is not None:
                    logprobs.append(logprob)
                text = stream.push(token)
                if stream.stopped:
                    reason = "stop"
                elif reason:
                    text += stream.finish()
                if text or reason:
                    given = logprobs if params.logprobs is not None else None
                    yield Chunk(text, sampled, given, reason)
                    sampled, logprobs = [], []
                if reason:
                    return
        except MemoryError as error:
            raise_out_of_memory(error, "to generate", LESS_MEMORY)

    def _tokens(
        self, prompt: list[int], params: SamplingParams, lookups: Lookups
    ) -> Iterator[tuple[int, TokenLogprobs | None, FinishReason | None]]:
        """Sample, ask for the token's rows, hand it out, compute the next logits.

        Yields each new token id, its log probabilities if asked for, and why it is the last.
        """
        room = min(self.plan.context_length - len(prompt) + 1, params.max_new_tokens)
        context = self.engine.open_context(len(prompt) + room - 1)
        sampler, seen, top = make_sampler(params), list(prompt), needed_logits(params)
        with self._recorder() as record, lookups:
            for logits in self.engine.process(context, prompt, lookups.prompt, top=top):
                last = logits[0]
            record.prefilled(len(prompt))
            for number in range(1, room + 1):
                logprob = None
                chosen = last if params.logprobs is None else last.copy()
                token = sampler(chosen, seen)
                if params.logprobs is not None:
                    logprob = token_logprobs(last, token, params.logprobs)
                ended = token in self.config.eos_ids
                reason: FinishReason | None = (
                    "stop" if ended else "length" if number == room else None
                )
                looked_up = np.array([lookups.of_token(token)])
                if reason is None:
                    self.engine.expect(looked_up)
                seen.append(token)
                record.sampled()
                yield token, logprob, reason
                if reason is None:
                    last = self._decode(context, token, looked_up, top, record)

    def _recorder(self) -> Recorder:
        stats = self.stats = GenerationStats.planned(self.plan)
        return Recorder(stats, self.engine.rows)  # self.stats may be another thread's by now

    def _decode(
        self, context: Context, token: int, stem_ids: I64, top: int, record: Recorder
    ) -> F32:
        """One decode step; logits [V] of the token after this one."""
        started = time.perf_counter()
        logits = self.engine.step(context, np.array([token]), stem_ids=stem_ids, top=top)
        record.decoded(time.perf_counter() - started)
        last: F32 = logits[0]
        return last

    def _checked_prompt(self, token_ids: Sequence[int]) -> list[int]:
        self.engine.check_usable()
        ids = self._checked(token_ids)
        if not ids:
            raise InputError("the prompt is empty; give at least one token id")
        check_text(self.config, ids)
        if len(ids) > self.plan.context_length:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the context holds {self.plan.context_length}; "
                f"{shorten(self.plan.context_length, self.config.max_context)}"
            )
        return ids

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        return checked_ids(token_ids, self.config.vocab_size)

    def close(self) -> None:
        """Release memory, threads and files; closing twice is fine.

        Any thread may call it: a step under way comes to its end, and what uses the model then
        raises InputError. In a forked process it does nothing: the model is its parent's.
        """
        first, self._closed = not self._closed, True
        self._chat.close()
        try:
            self.engine.close()
        finally:
            if first and self._on_close is not None and not self.engine.forked:
                self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
