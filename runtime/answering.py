"""Calls on a loaded bundle, one sequence at a time: logits, text generation, edits of table lookups."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import numpy as np

from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.model_text import ModelText
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams, params_of
from stem_edge.runtime.scheduling.loop import Loop
from stem_edge.runtime.scheduling.request import Chunk, Request, Stepping
from stem_edge.runtime.stats import GenerationStats, Recorder
from stem_edge.runtime.text.codec import TextCodec, shorten
from stem_edge.system.memory import raise_out_of_memory

if TYPE_CHECKING:  # imported by the methods that need them, which few callers use
    from stem_edge.bundle.edit_files.file import Edit
    from stem_edge.runtime.grammars.constraint import Grammars
    from stem_edge.runtime.grammars.grammar import Grammar
    from stem_edge.runtime.lookups.lookups import Lookups
    from stem_edge.runtime.lookups.overlay import Overlay
    from stem_edge.runtime.token_ids import StemId


class Answering(ModelText):
    """The methods of Model that process one sequence: generate, logits, edits. Thread-safe."""

    def __new__(cls, *parts: object) -> Self:
        """Raise InputError if a caller writes Model(path) instead of stem_edge.load(path)."""
        if not parts or isinstance(parts[0], str | Path):
            raise InputError(f"{cls.__name__} is made by stem_edge.load; use stem_edge.load(path)")
        return super().__new__(cls)

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        plan: MemoryPlan,
        text: TextCodec,
        prefixes: Prefixes,
        stepping: Stepping,
    ) -> None:
        super().__init__(bundle, text)
        self.plan: MemoryPlan = plan  # memory, and the context length that fits
        # Metrics of the latest generate or logits. Concurrent calls count each other's rows.
        self.stats: GenerationStats = GenerationStats(engine=plan.engine, provider=plan.provider)
        self.engine = engine  # for callers that measure, or feed tokens themselves
        self._prefixes = prefixes
        # Edits of the running `edited` blocks. All threads share them; each removes only its own.
        self._open_edits: dict[object, tuple[Edit, ...]] = {}
        self._overlay: Overlay | None = None  # of the latest edits
        self.stepping = stepping  # whether a step may have several tokens, and what drafts them

    @contextmanager
    def edited(self, *edits: Edit | str | Path) -> Iterator[Self]:
        """Apply edits to the calls of generate and logits inside `with model.edited(edit):`.

        edits: results of stem_edge.make_edit, or paths of edit files. An edit makes tokens look up other tokens'
            table rows. Edits apply in the given order, after the edits of an enclosing `edited`. Each edit copies
            the bundle's original rows, not edited rows. If two edits change the same row, the later edit wins.

        A call keeps the edits that are in effect when it begins. If edits have scope "positions", the prompt
        must contain the source text of at least one of these edits.

        Raises EditError for a file that is not an edit or was made for another bundle, InputError
        for an edit that cannot be applied.
        """
        from stem_edge.bundle.edit_files.file import open_edit
        from stem_edge.runtime.lookups.overlay import Overlay

        self.engine.check_usable()
        opened, key = tuple(open_edit(self.bundle, edit) for edit in edits), object()
        Overlay(self._text, self.config, opened)  # refuse them here rather than at the first call
        self._open_edits[key] = opened
        try:
            yield self
        finally:
            del self._open_edits[key]

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV caches of running calls and of cached prompts."""
        return self._prefixes.nbytes

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Edits of table lookups (see edited) that the next generate or logits call applies, in order."""
        return tuple(edit for opened in list(self._open_edits.values()) for edit in opened)

    def logits(self, token_ids: Sequence[int], *, stem_ids: Sequence[StemId] | None = None) -> F32:
        """Return the logits, float32 [T, V], of all T tokens, computed from an empty context.

        Raises InputError for no ids, ids out of range, or more ids than the context holds.

        stem_ids: see generate.
        """
        ids = self._prompt_ids(token_ids)
        try:
            logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        except MemoryError as error:
            raise_out_of_memory(error, "for logits", "take logits_chunks, or a shorter text")
        filled = 0
        for piece in self.logits_chunks(ids, stem_ids=stem_ids):
            logits[filled : filled + len(piece)] = piece
            filled += len(piece)
        return logits

    def logits_chunks(
        self, token_ids: Sequence[int], *, stem_ids: Sequence[StemId] | None = None
    ) -> Iterator[F32]:
        """Yield the result of `logits` in consecutive pieces [n, V], which need less memory.

        Each piece overwrites the previous one. Raises InputError before iteration starts, as `logits` does.
        """
        pieces = list[F32]()
        request = self.request(token_ids, stem_ids=stem_ids, score=pieces.append)
        steps = Loop(self.engine, self._prefixes, self.stepping).run(request, self._recorder)
        return (pieces.pop() for _ in steps)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stem_ids: Sequence[StemId] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generator[Chunk]:
        """Continue a text or token ids; yield each chunk as soon as its text can no longer change.

        Options are the fields of SamplingParams. One of grammar, schema and regex restricts the text.

        stem_ids: for each token of the prompt, the token id whose rows it looks up, or several ids to use
        the mean of their rows. By default, each token looks up its own rows. With stem_ids, the prompt
        reads the bundle's rows without edits, and edits (see edited) apply to generated tokens only.

        Raises InputError at once for a bad option or prompt. Raises RowReadError while iterating when
        a read from flash fails.
        """
        request = self.request(prompt, params, stem_ids=stem_ids, **options)
        return Loop(self.engine, self._prefixes, self.stepping).run(request, self._recorder)

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stem_ids: Sequence[StemId] | None = None,
        score: Callable[[F32], None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Request:
        """Check the arguments, which are those of `generate`, and make a Request for a scheduler.

        score: function that gets the logits of each step of the prompt, float32 [n, V]. With score, nothing is generated.
        """
        params = params_of(params, options)
        return self._request(prompt, params, stem_ids, self._edits_now(), score)

    def _request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        stem_ids: Sequence[StemId] | None,
        edits: Overlay | None,
        score: Callable[[F32], None] | None = None,
    ) -> Request:
        ids, params = self._prompt_ids(prompt), self.chosen(params)
        if params.logit_bias:
            from stem_edge.runtime.token_ids import checked_ids

            checked_ids([int(params.biases[0].max())], self.config.vocab_size)
        # The last token is handed out but never processed, so it takes no place in the context.
        length = min(self.plan.context_length, len(ids) + params.max_new_tokens - 1)
        length = length if score is None else len(ids)
        lookups = self._lookups(ids, stem_ids, edits)
        constraint = None if params.grammar is None else self._grammars.open(params.grammar)
        ends = self.config.eos_ids
        return Request(ids, lookups, length, params, self._text, ends, constraint, score)

    def generate_text(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stem_ids: Sequence[StemId] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> str:
        """Return all generated text as one string. Takes the arguments of `generate`."""
        chunks = self.generate(prompt, params, stem_ids=stem_ids, **options)
        return "".join(chunk.text for chunk in chunks)

    def _edits_now(self) -> Overlay | None:
        """Return which rows tokens look up in all running `edited` blocks; None without edits."""
        if not (edits := self.edits):
            return None
        from stem_edge.runtime.lookups.overlay import Overlay

        latest = self._overlay  # another thread may replace it
        if latest is None or edits != latest.edits:
            latest = self._overlay = Overlay(self._text, self.config, edits)
        return latest

    def _lookups(
        self, prompt: list[int], stem_ids: Sequence[StemId] | None, edits: Overlay | None
    ) -> Lookups | None:
        """Return which table rows the tokens of one call look up; None if all look up their own rows."""
        if edits is None and stem_ids is None:
            return None
        from stem_edge.runtime.lookups.lookups import Lookups
        from stem_edge.runtime.lookups.overlay import given_lookups

        given = None if stem_ids is None else given_lookups(self.config, stem_ids, len(prompt))
        return Lookups(self.engine, edits, prompt, given)

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile and cache a grammar. Raises InputError if no answer can match it."""
        self._grammars.open(grammar)

    @cached_property
    def _grammars(self) -> Grammars:
        from stem_edge.runtime.grammars.constraint import Grammars  # needs an optional package

        return Grammars(self._text, self.config.eos_ids, self.config.vocab_size)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        self.engine.check_usable()
        held, most = self.plan.context_length, self.config.max_context
        if isinstance(prompt, str):
            ids = self._text.encode_prompt(prompt, held, most)
        else:
            from stem_edge.runtime.token_ids import checked_ids  # those of a text are in range

            ids = checked_ids(prompt, self.config.vocab_size)
        if not ids:
            raise InputError("the prompt is empty; give at least one token id")
        if self.config.placeholders:
            from stem_edge.runtime.token_ids import check_text  # only for such models

            check_text(self.config, ids)
        if len(ids) > held:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the context holds {held}; {shorten(held, most)}"
            )
        return ids

    def _recorder(self) -> Recorder:
        # Another thread may replace self.stats before the next line, so it cannot be read back.
        self.stats = stats = GenerationStats(engine=self.plan.engine, provider=self.plan.provider)
        return Recorder(stats, self.engine.rows)

    def close(self) -> None:
        """Release memory, threads and files; closing twice is fine.

        Any thread may call it. A step that is running completes first. Later uses of the model raise
        InputError. In a forked process it does nothing, because the parent process owns the model.
        """
        if "chat" in vars(self):
            self.chat.close()
        try:
            if not self.engine.forked:
                self._prefixes.close()
        finally:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
