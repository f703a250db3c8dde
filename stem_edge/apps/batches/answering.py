"""Answers the prompts of a batch with a loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, cast

from stem_edge.apps.answers.events import AnswerEvents, Whole
from stem_edge.apps.answers.openai.options import biases, usage
from stem_edge.apps.answers.refusals import RefusalError, openai_error, refusal_of
from stem_edge.apps.answers.turn import prepare
from stem_edge.apps.batches.rows import Result, Row, key_of
from stem_edge.errors import DeviceLostError, StemEdgeError
from stem_edge.runtime.backends.options import check_sequences
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams, params_of
from stem_edge.runtime.scheduling.many import run
from stem_edge.runtime.scheduling.request import Chunk, Request
from stem_edge.shown import shown

SEQUENCES = 8  # answers computed together, if memory allows
GRAMMARS = ("grammar", "schema", "regex")


@dataclass(frozen=True)
class Settings:
    """Sampling options and parallelism of a batch; can be pickled.

    options: default sampling options of the rows. seed: a row without a seed gets a seed computed
    from this number and the row's id, so that a repeated run gives the same answers; None: random seeds.
    sequences: largest number of answers computed together. Raises InputError.
    """

    options: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int | None = 0
    sequences: int = SEQUENCES

    def __post_init__(self) -> None:
        check_sequences(self.sequences)
        params_of(None, {**self.options, "seed": self.seed})

    def params(self, row: Row, given: dict[str, Any]) -> SamplingParams:
        """Return a row's sampling params: its own values, else the batch's. Raises InputError."""
        own = {name: value for name, value in given.items() if value is not None}
        if "logit_bias" in own:
            own["logit_bias"] = biases(own["logit_bias"])
        others: dict[str, Any] = {**self.options}
        if any(name in own for name in GRAMMARS):
            others = {name: value for name, value in others.items() if name not in GRAMMARS}
        params = params_of(None, cast(SamplingOptions, others | own))
        return params if params.seed is not None else replace(params, seed=self._seed_of(row))

    def _seed_of(self, row: Row) -> int | None:
        if self.seed is None:
            return None
        given = self.seed.to_bytes(8, "little") + repr(key_of(row.id, row.line)).encode()
        return int.from_bytes(blake2b(given, digest_size=8).digest(), "little")


def answer(model: Model, rows: Iterable[Row], settings: Settings) -> Iterator[Result]:
    """Yield a result for each row (prompt) of a batch, in the order of completion.

    A row is read when there is room for one more answer; decoding pauses while it is read. If a row
    cannot be answered, its result is an error. Raises errors that make the model unusable.
    """
    tasks = dict[Request, tuple[Row, AnswerEvents, Whole]]()
    scheduler = model.scheduler(settings.sequences, steady=True)

    def begin(row: Row) -> Result | None:
        try:
            request, events = _task(model, row, settings)
        except StemEdgeError as error:
            return _failed(row, error)
        tasks[request] = row, events, Whole()
        scheduler.submit(request)
        return None

    def push(request: Request, chunk: Chunk) -> Result | None:
        ended = chunk.finish_reason is not None
        row, events, whole = tasks.pop(request) if ended else tasks[request]
        if isinstance(chunk.error, DeviceLostError):
            raise chunk.error
        if chunk.error is not None:
            return _failed(row, chunk.error)
        for event in events.push(chunk):
            whole.add(event)
        return _result(row, request, whole) if ended else None

    return run(scheduler, iter(rows), begin, push)


def _result(row: Row, request: Request, whole: Whole) -> Result:
    found: dict[str, Any] = {"id": row.id, "text": whole.text, "finish_reason": whole.reason}
    found["usage"] = usage([request])
    if whole.thoughts:
        found["reasoning_content"] = whole.thoughts
    if whole.logprobs is not None:
        found["logprobs"] = [asdict(each) for each in whole.logprobs]
    return found


def _failed(row: Row, error: StemEdgeError) -> Result:
    return {"id": row.id, "line": row.line, **openai_error(refusal_of(error))}


def _task(model: Model, row: Row, settings: Settings) -> tuple[Request, AnswerEvents]:
    """Create the request of a row. Raises InputError or RefusalError if its fields are invalid."""
    if row.wrong is not None:
        raise RefusalError(row.wrong)
    given = dict(row.fields)
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    if (prompt is None) == (messages is None):
        found = ", ".join(map(shown, row.fields)) or "neither"
        raise RefusalError(
            f"a row has either a prompt or messages, found {found}; give one of them"
        )
    params = settings.params(row, given)
    if messages is None:
        return model.request(prompt, params), AnswerEvents()
    (request,), events = prepare(model, messages, params)
    return request, events()
