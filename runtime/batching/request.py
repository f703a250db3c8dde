"""A prompt and its answer, and what it holds while it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from stem_edge.bundle.prefill_check import PREFILL_FROM
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.engine import Context, Engine, Step
from stem_edge.runtime.generation import Answer, Chunks, Sampled
from stem_edge.runtime.lookups.overlay import Lookups
from stem_edge.runtime.prefixes.kept import Prefixes, Reservation
from stem_edge.runtime.sampling import SamplingParams
from stem_edge.runtime.text.codec import TextCodec, TokenStream


class Request:
    """A prompt to continue, made by Model.request for Scheduler.submit, once.

    length: most tokens of prompt and answer that are processed.
    """

    sampled: Sampled  # the token chosen last
    stem_id: int  # whose row it looks up
    context: Context  # until it has joined a batch that copies

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        lookups: Lookups,
        length: int,
        codec: TextCodec,
        eos_ids: Collection[int],
    ) -> None:
        self.prompt, self.lookups, self.length = prompt, lookups, length
        self.cancelled = False  # set by any thread
        self.ended = False  # no more chunks come
        self.steps = deque[Step]()  # of the prompt, still to do
        self.seconds = 0.0  # that those done took
        self.cached = 0  # tokens of the prompt that an earlier call had computed
        self._params, self._codec, self._eos_ids = params, codec, eos_ids
        self._lent: AbstractContextManager[Context] | None = None
        self._reservation: Reservation | None = None

    @property
    def prefill(self) -> bool:
        """Tell whether the graph for prompts computes it, where there is one."""
        return len(self.prompt) >= PREFILL_FROM

    @property
    def position(self) -> int:
        """Place of the token chosen last in the text."""
        return len(self.answer.seen) - 1

    @property
    def goes_on(self) -> bool:
        """Tell whether the token chosen last is to be processed."""
        return self.sampled.finish_reason is None

    def begin(self, engine: Engine, prefixes: Prefixes, reserved: int) -> None:
        """Take a context and the memory that it will need, and cut the prompt into steps.

        reserved: bytes to reserve in a batch; 0 if the sequence stays in its context.
        """
        self.answer = Answer(self.prompt, self._params, self._eos_ids)
        self.chunks = Chunks(TokenStream(self._codec, self._params.stop), self._params)
        self.lookups.__enter__()
        lent = prefixes.lent(self.prompt, self.lookups.places, self.length, whole=not reserved)
        self.context = lent.__enter__()
        self._lent = lent
        if reserved:
            self._reservation = prefixes.reserve(reserved)
        self.cached = self.context.position
        stem_ids = self.lookups.prompt
        self.steps.extend(engine.steps(self.prompt, stem_ids, computed=self.cached))

    def choose(self, logits: F32) -> None:
        """Choose the next token by logits [V]. All before have been processed."""
        self.sampled = self.answer.choose(logits, room=self.length - len(self.answer.seen))
        if self.goes_on:
            self.stem_id = self.lookups.of_token(self.sampled.token_id)

    def free_context(self, error: BaseException | None = None) -> None:
        """Give the context back, which is kept for later prompts unless there was an error."""
        lent, self._lent = self._lent, None
        if lent is not None:
            del self.context
            lent.__exit__(None if error is None else type(error), error, None)

    def end(self, error: BaseException | None = None) -> None:
        """Give everything back; takes no lock, and may be called again."""
        self.ended = True
        self.free_context(error)
        self.lookups.__exit__()
        if self._reservation is not None:
            self._reservation.release()
