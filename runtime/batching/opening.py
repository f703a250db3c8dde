"""Making the scheduler of a loaded model, and many prompts through it, taken as places become free."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import repeat
from typing import TypeAlias

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import check_sequences
from stem_edge.runtime.batching.batch import Rounding
from stem_edge.runtime.batching.pump import Pump
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.decoding import Stepping
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.lookups.lookups import StemId
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams, params_of
from stem_edge.runtime.stats import Recorder


def open_scheduler(
    bundle: Bundle,
    engine: Engine,
    plan: MemoryPlan,
    prefixes: Prefixes,
    stepping: Stepping,
    record: Recorder,
    *,
    sequences: int,
    exact: bool | None,
    steady: bool,
) -> Scheduler:
    """Return a scheduler with as many places as memory allows, as Model.scheduler says."""
    check_sequences(sequences)
    footprint = footprint_of(bundle.manifest, plan.engine)
    if plan.device is not None:
        footprint = footprint.without_windows()
    sequences = min(sequences, engine.rows.step_sequences)
    exact = stepping.exact if exact is None else exact
    batches = not exact or stepping.same_in_batches
    if plan.device is not None:  # where contexts take their memory at once
        sequences, batches = min(sequences, plan.sequences), False
    return Scheduler(
        engine,
        prefixes,
        footprint.with_kv(plan.kv).kv_nbytes,
        record,
        partial(stepping.guessing, exact=exact),
        size=sequences,
        length=plan.context_length,
        rounding=Rounding(
            stepping.one_by_one(exact=exact), apart=not batches, steady=steady and not exact
        ),
    )


Prompt: TypeAlias = str | Sequence[int]
StemIds: TypeAlias = Sequence[StemId] | None


def params_of_each(
    params: SamplingParams | Iterable[SamplingParams] | None, options: SamplingOptions
) -> Iterable[SamplingParams]:
    """Return the params of each prompt. Raises InputError for these and options, too."""
    if params is None or isinstance(params, SamplingParams):
        return repeat(params_of(params, options))
    if options:
        raise InputError("give either params or single options, not both")
    return params


def requests(
    make: Callable[[Prompt, SamplingParams, StemIds], Request],
    prompts: Iterable[Prompt],
    params: Iterable[SamplingParams],
    stem_ids: Iterable[StemIds] | None,
) -> Iterable[Request | InputError]:
    """Return a request for each prompt, or why it is refused; made at once if prompts are a sequence.

    Raises InputError then, and if there are fewer params or stem_ids than prompts.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise InputError("prompts are texts or lists of token ids; give a list of prompts")
    found = _made(
        make, iter(prompts), iter(params), iter(repeat(None) if stem_ids is None else stem_ids)
    )
    if not isinstance(prompts, Sequence):
        return found
    checked = list(found)
    for request in checked:
        if isinstance(request, InputError):
            raise request
    return checked


def _made(
    make: Callable[[Prompt, SamplingParams, StemIds], Request],
    prompts: Iterator[Prompt],
    params: Iterator[SamplingParams],
    stem_ids: Iterator[StemIds],
) -> Iterator[Request | InputError]:
    for number, prompt in enumerate(prompts):
        try:
            given = next(params), next(stem_ids)
        except StopIteration:
            raise InputError(
                f"prompt {number} has no params or stem_ids; give as many as prompts"
            ) from None
        try:
            yield make(prompt, *given)
        except InputError as error:
            yield InputError(f"prompt {number}: {error}")


def run(
    scheduler: Scheduler, found: Iterable[Request | InputError]
) -> Generator[tuple[int, Chunk]]:
    """Return (number, chunk) of requests, which begin in their order; closes the scheduler at the end."""
    pump = Pump[int](scheduler)

    def begin(item: tuple[int, Request | InputError]) -> tuple[int, Chunk] | None:
        number, request = item
        if isinstance(request, InputError):
            return number, Chunk("", [], None, "error", request)
        pump.submit(request, number)
        return None

    return pump.run(enumerate(found), begin, lambda number, chunk: (number, chunk))


def texts(many: Generator[tuple[int, Chunk]]) -> list[str]:
    """Return the texts of all that `run` yields, by number. Raises the first error of any."""
    found: dict[int, str] = {}
    with closing(many):
        for number, chunk in many:
            if chunk.error is not None:
                raise chunk.error
            found[number] = found.get(number, "") + chunk.text
    return [found[number] for number in range(len(found))]
