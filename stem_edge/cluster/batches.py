"""Batches on a cluster: rows are answered by a loaded model on each machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue

from stem_edge.batches.rows import InputRow, Result
from stem_edge.batches.run import answer
from stem_edge.batches.settings import Answers, Settings
from stem_edge.cluster.memory import on_machine, planned_nbytes
from stem_edge.cluster.sharing import Work, share
from stem_edge.hub.fetch import pinned
from stem_edge.runtime import Model, load
from stem_edge.runtime.backends.keywords import LoadKeywords

# Rows that a machine has, for each sequence that it decodes at a time: there must be some that wait
# when several end together, because those that come later join only once all others have ended.
ROWS_PER_SEQUENCE = 3
# Rows of a call. A call takes some 3 ms of processor time beside its computing.
GROUP_ROWS = 16


def ray_answers(
    bundle: str | Path,
    keywords: LoadKeywords | None = None,
    settings: Settings | None = None,
    address: str = "auto",
) -> Answers:
    """Return a function for `answers` of stem_edge.batch that answers rows on a cluster.

    keywords: of stem_edge.load. address: "auto" for the cluster that runs here, its host:port, or
    "local" for this machine alone. The bundle must be on a disk that every machine has under the same
    path, or be named as on the hub, from which each machine then fetches it once.
    """
    return partial(_answers, bundle, keywords or {}, settings or Settings(), address)


def _answers(
    bundle: str | Path,
    keywords: LoadKeywords,
    settings: Settings,
    address: str,
    rows: Iterable[InputRow],
) -> Generator[Result]:
    bundle = pinned(bundle)  # so that all machines load one commit
    nbytes = planned_nbytes(bundle, keywords)
    work = Work(
        partial(_open, bundle, keywords, settings, nbytes),
        lambda cpus: nbytes,
        at_once=max(2, ROWS_PER_SEQUENCE * settings.sequences // GROUP_ROWS),
    )
    return _each(share(address, work, _groups(rows)))


def _each(groups: Generator[list[Result]]) -> Generator[Result]:
    with closing(groups):
        for results in groups:
            yield from results


def _groups(rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
    left = iter(rows)
    while group := list(islice(left, GROUP_ROWS)):
        yield group


def _open(
    bundle: str | Path, keywords: LoadKeywords, settings: Settings, nbytes: int, cpus: int
) -> Callable[[list[InputRow]], list[Result]]:
    return SharedModel(load(bundle, **on_machine(keywords, cpus, nbytes)), settings)


class SharedModel:
    """A model that answers rows of several threads together, in its own thread."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._rows = SimpleQueue[InputRow | None]()  # None: end
        self._asked = dict[int, Future[Result]]()  # by lines of rows
        self._thread = threading.Thread(target=self._run, name="stem-edge-answers", daemon=True)
        self._thread.start()

    def __call__(self, rows: list[InputRow]) -> list[Result]:
        """Wait for the answers to some rows."""
        found = [Future[Result]() for _ in rows]
        self._asked.update(zip((row.line for row in rows), found, strict=True))
        for row in rows:
            self._rows.put(row)
        return [each.result() for each in found]

    def close(self) -> None:
        """End the thread."""
        self._rows.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._rows.get()) is not None:
            try:
                for result in answer(self._model, self._now(first), self._settings):
                    self._asked.pop(result.line).set_result(result)
            except BaseException as error:
                while self._asked:
                    self._asked.popitem()[1].set_exception(error)

    def _now(self, row: InputRow | None) -> Iterator[InputRow]:
        """Yield the rows that are here; waiting for more would hold those that are being answered."""
        while row is not None:
            yield row
            try:
                row = self._rows.get_nowait()
            except Empty:
                return
        self._rows.put(None)
