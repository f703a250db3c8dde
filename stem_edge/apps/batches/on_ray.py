"""Batches on a Ray cluster: each Ray task answers some rows.

Ray repeats a task whose process or machine is lost. A process loads the model once, and uses it for
all its later tasks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from stem_edge.apps.batches.answering import Settings, answer
from stem_edge.apps.batches.rows import Result, Row
from stem_edge.errors import StemEdgeError
from stem_edge.runtime import Model, load
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.planning import memory_plan
from stem_edge.shown import format_size, one_line, shown
from stem_edge.system.memory import own_memory

AUTO = "auto"
ROWS_PER_SEQUENCE = 8  # in a task: sequences idle only at the end of a task
TRIES = 3  # of a task whose process dies each time
ANSWER_SECONDS = 10
PROCESS_NBYTES = 256 << 20  # at most, for a Ray process without a model


def ray_answers(
    bundle: str, keywords: LoadKeywords, settings: Settings, address: str, rows: Iterable[Row]
) -> Generator[Result]:
    """Yield a result for each row (prompt) of a batch, computed on a Ray cluster.

    keywords: of stem_edge.load. address: "auto" for the cluster on this machine, or host:port.
    bundle: a path that exists on each machine, or a name on a hub with its commit. Raises what load
    raises, and StemEdgeError for Ray's errors.
    """
    nbytes = memory_plan(bundle, **keywords).total - own_memory() + PROCESS_NBYTES
    with _connected(address) as ray, _own_errors(ray):
        cpus, places = _places(ray, nbytes)
        threads = min(keywords.get("threads") or cpus, cpus)
        # Memory limit of a process: without it, each process would plan with all free memory.
        memory = nbytes if keywords.get("memory") is None else keywords["memory"]
        given = {**keywords, "threads": threads, "memory": memory, "progress": False}
        task = ray.remote(_answer_rows).options(
            num_cpus=cpus, memory=nbytes, max_retries=TRIES, scheduling_strategy="SPREAD"
        )
        left, count, waiting = iter(rows), settings.sequences * ROWS_PER_SEQUENCE, list[Any]()
        while True:
            # Two tasks for each place: one that runs, and one that waits.
            while len(waiting) < 2 * places and (group := list(islice(left, count))):
                waiting.append(task.remote(bundle, tuple(sorted(given.items())), settings, group))
            if not waiting:
                return
            done, waiting = ray.wait(waiting, num_returns=1)
            for results in ray.get(done):
                yield from results


def _answer_rows(
    bundle: str, keywords: tuple[tuple[str, object], ...], settings: Settings, rows: list[Row]
) -> list[Result]:
    return list(answer(_model(bundle, keywords), rows, settings))


@lru_cache(maxsize=1)
def _model(bundle: str, keywords: tuple[tuple[str, object], ...]) -> Model:
    return load(bundle, **cast(LoadKeywords, dict(keywords)))


def _places(ray: Any, nbytes: int) -> tuple[int, int]:
    """Return CPUs per task, and how many tasks the cluster can run at a time.

    nbytes: memory of a task. Raises StemEdgeError if no machine has this much memory and a CPU.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = [int(has["CPU"]) for has in alive if has.get("CPU") and has.get("memory", 0) >= nbytes]
    if not fit:
        most = format_size(int(max((has.get("memory", 0) for has in alive), default=0)))
        raise StemEdgeError(
            f"ray: none of {len(alive)} machines has a CPU and {format_size(nbytes, up=True)} of "
            f"memory, the most is {most}; give less with --memory, or start machines with more "
            "(ray start --memory)"
        )
    cpus = min(fit)
    return cpus, sum(each // cpus for each in fit)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster and yield module `ray`. An existing connection is reused."""
    # Ray would count uses and send them off; its processes inherit this setting.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise StemEdgeError(
            f"ray is not installed ({error}); install it with: pip install 'stem-edge[ray]'"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    try:
        if address != AUTO:  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise StemEdgeError(
            f"ray {shown(address)}: cannot connect ({one_line(error)}); give the host:port of a "
            "cluster that ray start --head began, or auto for the one on this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_errors(ray: Any) -> Iterator[None]:
    """Context manager that raises the cause of a failed task, and Ray's errors as StemEdgeError."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (StemEdgeError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise StemEdgeError(
            f"ray: {one_line(error)}; look at the cluster with ray status, and start again: what is "
            "finished is kept"
        ) from error
