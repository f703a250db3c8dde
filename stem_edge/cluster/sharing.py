"""Pieces of work for a process on each machine of a cluster, and again elsewhere if one is lost.

Ray starts the processes, and again if one dies (RESTARTS); then it repeats what that one had. If a
machine is gone, its pieces go to the others. Pieces are taken as machines have room for them, and
results come as they are done, so neither are ever all in memory.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from stem_edge.cluster.connection import connect, own_errors
from stem_edge.errors import StemEdgeError
from stem_edge.files.strict_json import one_line
from stem_edge.progress import tell
from stem_edge.units import format_size

T = TypeVar("T")
R = TypeVar("R")

RESTARTS = 3  # of a process, so that work that kills every process ends
BUSY_SECONDS = 15.0  # a process begins within this time on a free machine


@dataclass(frozen=True)
class Work(Generic[T, R]):
    """Work of a process on each machine; it is sent there.

    open: takes the number of CPUs, and returns what works on a piece; called once in a process.
    nbytes: memory of the process, by CPUs. at_once: pieces that it works on together.
    """

    open: Callable[[int], Callable[[T], R]]
    nbytes: Callable[[int], int]
    at_once: int = 1


class MachineWorker(Generic[T, R]):
    """The process on a machine; an actor of Ray."""

    def __init__(self, work: Work[T, R], cpus: int) -> None:
        self._work, self._cpus, self._lock = work, cpus, threading.Lock()
        self._opened: Callable[[T], R] | None = None

    def begun(self) -> None:
        """Return as soon as this process runs."""

    def ready(self) -> None:
        """Open what pieces need."""
        with self._lock:  # several calls begin together after a restart
            if self._opened is None:
                self._opened = self._work.open(self._cpus)

    def do(self, piece: T) -> R:
        """Work on a piece."""
        self.ready()
        assert self._opened is not None
        return self._opened(piece)


def share(address: str, work: Work[T, R], pieces: Iterable[T]) -> Generator[R]:
    """Yield the result of each piece as it is done, in any order; return once a machine is ready.

    address: as for `connect`. Raises what `work` raises, and StemEdgeError if no machine is left.
    """
    shared = _share(address, work, pieces)
    next(shared)
    return shared


def _share(address: str, work: Work[T, R], pieces: Iterable[T]) -> Generator[Any]:
    """Yield None when a machine is ready, and then the results."""
    with connect(address) as ray, own_errors(ray):
        machines = _Machines(ray, work, iter(pieces))
        try:
            machines.begin()
            yield None
            yield from machines.results()
        finally:
            machines.end()


class _Machines(Generic[T, R]):
    """Actors, how many more pieces each can take, and what each call of them is for."""

    def __init__(self, ray: Any, work: Work[T, R], pieces: Iterator[T]) -> None:
        self._ray, self._pieces, self._lost = ray, pieces, deque[T]()
        # One more than it works on is on its way, or as many, if they are small enough to be several.
        self._room_of_each = 2 * work.at_once
        self._actors = {_start(ray, work, node): node for node in _nodes(ray, work)}
        self._starting = dict[Any, Any]()  # actors by the calls that make them ready
        self._room, self._calls = dict[Any, int](), dict[Any, tuple[Any, T]]()
        self._last: BaseException | None = None

    def begin(self) -> None:
        """Wait until a machine is ready."""
        begun = [actor.begun.remote() for actor in self._actors]
        if not self._ray.wait(begun, num_returns=1, timeout=BUSY_SECONDS)[0]:
            tell(
                f"ray: waiting for one of {len(begun)} machines; other work of the cluster seems to "
                "occupy them all (see ray status)"
            )
        self._starting = {actor.ready.remote(): actor for actor in self._actors}
        while self._starting and not self._room:
            for call in self._wait():
                self._begin(call)

    def results(self) -> Generator[R]:
        """Yield the result of each piece."""
        while self._give() or self._calls:
            if not self._starting and not self._room:
                raise StemEdgeError(
                    f"ray: no machine is left to go on ({one_line(self._last)}); start the command "
                    "again: what is finished is kept"
                ) from self._last
            for call in self._wait():
                if call in self._starting:
                    self._begin(call)
                else:
                    yield from self._finish(call)

    def end(self) -> None:
        """End all processes."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _give(self) -> bool:
        """Give pieces to machines while one has room; return whether some are left, or may be."""
        while self._room and self._room[actor := max(self._room, key=self._room.__getitem__)] > 0:
            try:
                piece = self._lost.popleft() if self._lost else next(self._pieces)
            except StopIteration:
                return False
            self._room[actor] -= 1
            self._calls[actor.do.remote(piece)] = actor, piece
        return True

    def _wait(self) -> list[Any]:
        """Wait for calls, and return all that are done."""
        calls = [*self._starting, *self._calls]
        self._ray.wait(calls, num_returns=1)
        done: list[Any] = self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        return done

    def _begin(self, call: Any) -> None:
        actor = self._starting.pop(call)
        try:
            if self._got(call, actor) is not None:
                self._room[actor] = self._room_of_each
        except self._ray.exceptions.RayTaskError as error:
            if not self._starting and not self._room:
                raise
            node = self._actors.pop(actor)
            self._ray.kill(actor)
            said = f"ray: machine {node.host} is left out: {one_line(error.cause)}"
            warnings.warn(said, stacklevel=2)

    def _finish(self, call: Any) -> Generator[R]:
        actor, piece = self._calls.pop(call)
        found = self._got(call, actor)
        if actor in self._room:
            self._room[actor] += 1
        if found is None:
            self._lost.append(piece)
        else:
            yield found[0]

    def _got(self, call: Any, actor: Any) -> tuple[R] | None:
        """Return a call's result; None if it, or its machine, is gone."""
        errors = self._ray.exceptions
        try:
            return (self._ray.get(call),)
        except errors.ObjectLostError:  # its node died before it was handed over
            return None
        except (errors.RayActorError, errors.ActorUnschedulableError) as error:
            self._room.pop(actor, None)
            self._last = error
            return None


class _Node(NamedTuple):
    """A machine, and CPUs and memory of its process."""

    id: str
    host: str
    cpus: int
    nbytes: int


def _nodes(ray: Any, work: Work[Any, Any]) -> list[_Node]:
    """Return the machines that have room for a process."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found, most = list[_Node](), 0
    for node in alive:
        cpus, memory = (int(node["Resources"].get(name, 0)) for name in ("CPU", "memory"))
        if cpus and memory >= (needed := work.nbytes(cpus)):
            found.append(_Node(node["NodeID"], node["NodeManagerHostname"], cpus, needed))
        most = max(most, memory)
    if not found:
        raise StemEdgeError(
            f"ray: none of {len(alive)} machines has a CPU and {format_size(work.nbytes(1), up=True)} "
            f"of memory, the most is {format_size(most)}; give less with --memory, or start machines "
            "with more (ray start --memory)"
        )
    return found


def _start(ray: Any, work: Work[Any, Any], node: _Node) -> Any:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    actor = ray.remote(MachineWorker).options(
        num_cpus=node.cpus,
        memory=node.nbytes,
        scheduling_strategy=strategy,
        max_concurrency=work.at_once,
        max_restarts=RESTARTS,
        max_task_retries=-1,  # as long as it is restarted
    )
    return actor.remote(work, node.cpus)
