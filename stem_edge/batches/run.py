"""Rows to results on one machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stem_edge.batches.interrupts import interrupts_held
from stem_edge.batches.results import Result
from stem_edge.batches.rows import Row
from stem_edge.batches.settings import Answers, Settings
from stem_edge.batches.task import Task
from stem_edge.batches.tasks import Tasks
from stem_edge.errors import DeviceLostError
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.model import Model

END = Row(None, 0, b"")  # after the last one
__all__ = ["Answers", "Settings", "answer"]


def answer(
    model: Model, rows: Iterable[Row | None], settings: Settings | None = None
) -> Iterator[Result]:
    """Yield a result for each row, in the order of their completion.

    rows: taken as places become free, so they may be of any number. Nothing decodes while it waits for
    the next one; None instead of a row means that there is none yet, and lets others go on.

    What is wrong with a row makes its result an error; what ends the model, such as a lost device, is
    raised.
    """
    settings = settings or Settings()
    tasks = Tasks(model, settings)
    return _Run(model.scheduler(settings.sequences, steady=True), tasks).results(iter(rows))


class _Run:
    """Rows in the places of a scheduler."""

    def __init__(self, scheduler: Scheduler, tasks: Tasks) -> None:
        self._scheduler, self._tasks = scheduler, tasks
        self._running = dict[Request, Task]()
        self._lost: DeviceLostError | None = None

    def results(self, rows: Iterator[Row | None]) -> Iterator[Result]:
        """Yield the results; close the scheduler at the end."""
        scheduler, more = self._scheduler, True
        try:
            while more or scheduler.busy:
                while more and scheduler.free > 0:
                    row = next(rows, END)
                    if row is None:
                        break
                    if row is END:
                        more = False
                    elif (result := self._begin(row)) is not None:
                        yield result
                with interrupts_held():
                    done = self._step()
                yield from done
                if self._lost is not None:
                    raise self._lost
        finally:
            scheduler.close()

    def _begin(self, row: Row) -> Result | None:
        """Queue the requests of a row; return its result if it has none."""
        task = self._tasks.task(row)
        if isinstance(task, Result):
            self._scheduler.check_usable()  # otherwise every row would be refused
            return task
        for request in task.requests:
            self._running[request] = task
            self._scheduler.submit(request)
        return None if task.requests else task.result()

    def _step(self) -> list[Result]:
        """Do a unit of work; return the results that it completes."""
        done = list[Result]()
        for request, chunk in self._scheduler.step():
            task = self._running.get(request)
            if isinstance(chunk.error, DeviceLostError):
                self._lost = chunk.error
                break
            result = None if task is None else task.push(request, chunk)
            if chunk.finish_reason is not None:
                self._running.pop(request, None)
            if result is not None and task is not None:
                self._forget(task)
                done.append(result)
        return done

    def _forget(self, task: Task) -> None:
        """End the requests of a task that have not ended, as after an error of one."""
        for request in task.requests:
            if self._running.pop(request, None) is not None:
                self._scheduler.cancel(request)
