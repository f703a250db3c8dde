"""Runs many prompts through a scheduler, and yields chunks of their answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

from stem_edge.errors import InputError
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams, params_of
from stem_edge.runtime.scheduling.request import Chunk, Request
from stem_edge.runtime.scheduling.scheduler import Scheduler
from stem_edge.runtime.token_ids import StemId

Prompt: TypeAlias = str | Sequence[int]
StemIds: TypeAlias = Sequence[StemId] | None
Item = TypeVar("Item")
Result = TypeVar("Result")
END: Any = object()  # after the last item


def params_of_each(
    params: SamplingParams | Iterable[SamplingParams] | None, options: SamplingOptions
) -> Iterable[SamplingParams]:
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
    """Return, for each prompt, its request or the InputError that refuses the prompt.

    A sequence of prompts is checked now, and its first InputError is raised. Prompts of an iterator
    are checked one by one. Raises InputError if there are fewer params than prompts.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise InputError("prompts are texts or lists of token ids; give a list of prompts")
    params, stem_ids = iter(params), iter(repeat(None) if stem_ids is None else stem_ids)

    def made() -> Iterator[Request | InputError]:
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

    if not isinstance(prompts, Sequence):
        return made()
    checked = list(made())
    for request in checked:
        if isinstance(request, InputError):
            raise request
    return checked


def numbered(
    scheduler: Scheduler, found: Iterable[Request | InputError]
) -> Generator[tuple[int, Chunk]]:
    """Run several requests at a time, begun in order; yield (request number, chunk) pairs.

    An InputError in `found` becomes a chunk with this error. Closes the scheduler at the end.
    """
    numbers = dict[Request, int]()

    def begin(item: tuple[int, Request | InputError]) -> tuple[int, Chunk] | None:
        number, request = item
        if isinstance(request, InputError):
            return number, Chunk("", [], None, "error", request)
        numbers[request] = number
        scheduler.submit(request)
        return None

    def push(request: Request, chunk: Chunk) -> tuple[int, Chunk]:
        ended = chunk.finish_reason is not None
        return numbers.pop(request) if ended else numbers[request], chunk

    return run(scheduler, enumerate(found), begin, push)


def run(
    scheduler: Scheduler,
    items: Iterator[Item],
    begin: Callable[[Item], Result | None],
    push: Callable[[Request, Chunk], Result | None],
) -> Generator[Result]:
    """Run items in a scheduler, each once the scheduler has room for it; yield their results.

    Closes the scheduler at the end. Nothing decodes while `items` waits for its next item.
    begin: submits the request of an item, or returns the item's result if it needs no request.
    push: gets each chunk, and returns a result to yield, or None.
    """
    more = True
    try:
        while more or scheduler.busy:
            while more and scheduler.free > 0:
                more = (item := next(items, END)) is not END
                if more and (result := begin(item)) is not None:
                    scheduler.check_usable()  # otherwise every item could be refused
                    yield result
            results = [push(request, chunk) for request, chunk in scheduler.step()]
            yield from (result for result in results if result is not None)
    finally:
        scheduler.close()


def texts(many: Generator[tuple[int, Chunk]]) -> list[str]:
    """Join (prompt number, chunk) pairs to one text for each prompt. Raises the first error."""
    found: dict[int, str] = {}
    with closing(many):
        for number, chunk in many:
            if chunk.error is not None:
                raise chunk.error
            found[number] = found.get(number, "") + chunk.text
    return [found[number] for number in range(len(found))]
