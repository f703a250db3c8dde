"""Rows to results on one machine."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

from stem_edge.batches.rows import InputRow, Result
from stem_edge.batches.settings import Settings
from stem_edge.batches.tasks import Task, Tasks
from stem_edge.errors import DeviceLostError
from stem_edge.runtime.batching.pump import Pump
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.model import Model


def answer(
    model: Model, rows: Iterable[InputRow | None], settings: Settings | None = None
) -> Iterator[Result]:
    """Yield a result for each row, in the order of completion.

    rows: any number, taken as places become free. Nothing decodes while it waits for the next one.
    None instead of a row means that no row is ready yet, and lets others go on.

    A wrong row gives an error as its result. Raises errors that end the model, such as a lost device.
    """
    settings = settings or Settings()
    tasks = Tasks(model, settings)
    pump = Pump[tuple[Task, Request]](model.scheduler(settings.sequences, steady=True))

    def begin(row: InputRow) -> Result | None:
        task = tasks.task(row)
        for request in task.requests:
            pump.submit(request, (task, request))
        return None if task.requests else task.result()

    def push(owner: tuple[Task, Request], chunk: Chunk) -> Result | DeviceLostError | None:
        task, request = owner
        if isinstance(chunk.error, DeviceLostError):
            return chunk.error
        result = task.push(request, chunk)
        if result is not None:
            for each in task.requests:  # some may not have ended, as after an error of one
                pump.cancel(each)
        return result

    return _until_lost(pump.run(iter(rows), begin, push))


def _until_lost(results: Generator[Result | DeviceLostError]) -> Iterator[Result]:
    with closing(results):
        for result in results:
            if isinstance(result, DeviceLostError):
                raise result
            yield result
