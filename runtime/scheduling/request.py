"""One generation request: its prompt, sampling, stop conditions and chunks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.costs import SIZES, StepCosts
from stem_edge.runtime.engine import Engine, Guesses, Speculation, Step
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.text.stream import TokenStream

if TYPE_CHECKING:
    from stem_edge.runtime.grammars.constraint import GrammarConstraint
    from stem_edge.runtime.lookups.lookups import Lookups
    from stem_edge.runtime.sampling import Sampler, TokenLogprobs

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Chunk:
    """A piece of generated text with the tokens that it came from.

    The texts of all chunks, joined, are the generated text. A token that ends the generation is
    among the ids, but its text is left out.
    """

    text: str  # may end within a word, never within a character
    token_ids: list[int]  # ids since the last chunk
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    # On the last chunk: "stop", "length" when room ran out, or "error", only in generate_many.
    finish_reason: FinishReason | None
    error: StemEdgeError | None = None  # the error, if finish_reason is "error"
    stop: str | None = None  # the stop text that ended the answer
    thoughts: str = ""  # the model's thoughts; only conversations separate them from the text


class Stepping(NamedTuple):
    """Whether decode steps may combine sequences or drafts, and how tokens are drafted."""

    # Decode several tokens or sequences in a step only if that changes no bits.
    exact: bool = False
    costs: StepCosts | None = None  # if they are known
    speculation: Speculation | None = None  # None: nothing drafts

    @property
    def same_bits(self) -> bool:
        """True if steps of several tokens give bit-identical results to one-token steps."""
        return self.costs is not None and self.costs.same_bits

    @property
    def batches(self) -> bool:
        return not self.exact or (self.costs is not None and self.costs.same_in_batches)

    def guesses(self, context: Context) -> Guesses | None:
        """Return a new source of drafts for an answer; None without speculative decoding."""
        if self.speculation is None or (self.exact and not self.same_bits):
            return None
        return self.speculation(context)


class Request:
    """A prompt and its answer so far. Model.request makes it, and Scheduler.submit accepts it once.

    Any thread may read its metrics.

    lookups: edits, rows that tokens look up in place of their own. length: most tokens to process,
    of prompt and answer. constraint: grammar of the answer. score: function that gets the logits
    [n, V] of each step of the prompt. With it, each such step gives a chunk without text, and
    nothing is generated.
    """

    context: Context  # once it has begun
    last: Step  # step of the token that was chosen last, which is not processed yet

    def __init__(
        self,
        prompt: Sequence[int],
        lookups: Lookups | None,
        length: int,
        params: SamplingParams,
        codec: TextCodec,
        eos_ids: Collection[int],
        constraint: GrammarConstraint | None = None,
        score: Callable[[F32], None] | None = None,
    ) -> None:
        self.prompt, self.lookups, self.length = prompt, lookups, length
        self.params, self.constraint, self.score = params, constraint, score
        self.cancelled = False  # any thread may set it; the next step ends the request
        self.begun = False  # it has a context
        self.ended = False  # no more chunks come
        self.seen = list[int]()  # prompt and answer so far, once it has begun
        self.steps = deque[Step]()  # steps of the prompt that remain
        self.prompt_seconds = 0.0  # to get a context and to run the prompt's steps
        self.cached_tokens = 0  # tokens of the prompt from the prefix cache
        self.new_tokens = 0
        self.decode_seconds = 0.0  # between the first new token and the latest
        self._first = 0.0  # time of the first new token
        self.guesses: Guesses | None = None
        self._give_back: Callable[..., None] | None = None
        self._eos_ids = eos_ids
        self._sampler: Sampler | None = None  # None: each token is the most probable one
        if not params.greedy:
            from stem_edge.runtime.sampling import Sampler

            self._sampler = Sampler(params, len(prompt))
        self._reason: FinishReason | None = None
        skip, silent = params.skip_special_tokens, eos_ids
        if skip and (kept := params.kept_special_tokens):
            skip, silent = False, codec.special_ids(kept).union(eos_ids)
        self._stream = TokenStream(codec, params.stop, skip_special_tokens=skip, silent=silent)
        self._token_ids: list[int] = []  # since the last chunk, as are the log probabilities
        self._logprobs: list[TokenLogprobs] = []

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def goes_on(self) -> bool:
        """True until a token, a stop text or the length has ended the answer."""
        return self._reason is None

    def begin(self, engine: Engine, prefixes: Prefixes) -> None:
        """Take a context from the prefix cache, and split the rest of the prompt into steps."""
        started, self.seen = time.perf_counter(), list(self.prompt)
        self._engine, lookups = engine, self.lookups
        if every := self.score is not None:  # all logits are wanted, so no cached prompt is used
            self.context = prefixes.empty(self.length)
        else:
            places = {} if lookups is None else lookups.places
            self.context = prefixes.take(self.prompt, places, self.length)
        self._give_back = partial(prefixes.give_back, self.context)
        self.cached_tokens = self.context.position
        rows, cached = None if lookups is None else lookups.prompt, self.cached_tokens
        self.steps.extend(engine.steps(self.prompt, rows, computed=cached, all_logits=every))
        self.prompt_seconds = time.perf_counter() - started
        self.begun = True

    def drafted(self, most: int, forced: int) -> Step:
        """Return the next decode step: the last chosen token and drafts of the tokens after it.

        most: most tokens of the step. forced: most drafts of tokens that the grammar forces.
        """
        if self.guesses is None and self.constraint is None:
            return self.last
        room = min(self.context.together, most) - 1
        only = [] if self.constraint is None else self.constraint.forced(min(room, forced))
        size = max(size for size in (1, *SIZES) if size <= 1 + len(only))
        drafts = only[: size - 1]
        if self.guesses is not None and not drafts:
            drafts = self.guesses(self.seen, room)
        return self._next(drafts) if drafts else self.last

    def _next(self, drafts: Sequence[int] = ()) -> Step:
        rows, last, lookups = self._engine.rows, len(self.seen) - 1, self.lookups
        first = max(0, last - rows.before)
        tokens = [*self.seen[first:], *drafts]
        ids = np.array(tokens, np.int64)
        own = None if lookups is None else lookups.row_ids(tokens, first)
        return Step(ids[last - first :], rows.ids(ids, own, last - first), 1 + len(drafts))

    def verify(self, logits: F32, drafts: Sequence[int]) -> Iterator[bool]:
        """Choose tokens until one differs from its draft; yield True per right draft, then False.

        logits: [1 + drafts, V]. The sampler sees the same random numbers and earlier tokens as
        without drafts. At the end, the context has all tokens except the last one.
        """
        for place, line in enumerate(logits):
            self.choose(line)
            left = len(drafts) - place
            if left and self.goes_on and self.seen[-1] == drafts[place]:
                yield True
                continue
            if left:
                self.context.rewind(self.context.position - left)
            yield False
            return

    def choose(self, logits: F32) -> None:
        # The sampler may change the logits, but log probabilities are the model's own.
        scores = logits if self.params.logprobs is None else logits.copy()
        constraint = self.constraint
        if constraint is not None and (only := constraint.forced(1)):
            if self._sampler is not None:
                self._sampler.skip()
            token = only[0]
        else:
            if constraint is not None:
                constraint.mask(scores)
            choose = self._sampler
            token = int(scores.argmax()) if choose is None else choose(scores, self.seen)
        if self.params.logprobs is not None:
            from stem_edge.runtime.sampling import token_logprobs

            self._logprobs.append(token_logprobs(logits, token, self.params.logprobs))
        self.seen.append(token)
        if token in self._eos_ids:
            self._reason = "stop"
        elif constraint is not None:
            constraint.accept(token)
            self._reason = "stop" if constraint.ended else None
        if self._reason is None and len(self.seen) > self.length:
            self._reason = "length"
        if self._reason is None:
            self.last = self._next()

    def hand_out(self) -> Chunk | None:
        """Return a chunk if some text can no longer change, or if the answer ends; None otherwise."""
        now = time.perf_counter()
        self._first = self._first or now
        self.new_tokens, self.decode_seconds = self.new_tokens + 1, now - self._first
        self._token_ids.append(token := self.seen[-1])
        text = self._stream.push(token)
        if self._stream.stop_text is not None:
            self._reason = "stop"
        elif self._reason:
            text += self._stream.finish()
        if not text and not self._reason:
            return None
        ids, logprobs = self._token_ids, None if self.params.logprobs is None else self._logprobs
        self._token_ids, self._logprobs = [], []
        return Chunk(text, ids, logprobs, self._reason, stop=self._stream.stop_text)

    def failed(self, error: StemEdgeError) -> Chunk:
        """Return the last chunk of an answer that failed. Text that was held back is lost."""
        link: BaseException | None = error
        while link is not None:  # its traceback would keep a KV cache alive with the chunk
            link = link.with_traceback(None)
            link = link.__cause__ or link.__context__
        logprobs = None if self.params.logprobs is None else self._logprobs[: len(self._token_ids)]
        return Chunk("", self._token_ids, logprobs, "error", error)

    def end(self, error: BaseException | None = None) -> None:
        """Release the context and other resources. Takes no lock, and may be called again.

        The context is cached for later prompts unless there was an error.
        """
        self.ended = True
        self.guesses = None  # which may hold the context
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            del self.context
            give_back(keep=not isinstance(error, Exception))
        self.lookups = None  # which keeps rows of edits


def computed(engine: Engine, context: Context, step: Step) -> tuple[Step, F32]:
    """Compute a step of a token and its drafts; if that fails, compute the token alone.

    Without the second try, an unreadable row of a wrong draft could end the answer.
    """
    compute = partial(engine.step, [context], apart=True)
    try:
        return step, compute(step)
    except StemEdgeError:
        if step.logits == 1:
            raise
    step = Step(step.token_ids[:1], step.row_ids[:1], 1)
    return step, compute(step)
