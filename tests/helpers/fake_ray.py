"""Enough of Ray to share work among machines in this process; calls are computed when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """Base of Ray's errors."""


class RayTaskError(RayError):
    """What a call raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class LostError(RayError):
    """A result that went with its machine."""


class DiedError(RayError):
    """An actor that is gone."""


class Call:
    """A call of an actor's method."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


class Actor:
    """A process; `remote` of a method makes a call."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._made, name)
        return SimpleNamespace(remote=lambda *given: Call(lambda: method(*given)))


class FakeRay:
    """A connection to machines, of which the first has one CPU, the next two, and so on."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayTaskError,
        RayActorError=DiedError,
        ActorUnschedulableError=DiedError,
        ObjectLostError=LostError,
    )
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    )

    def __init__(self, count: int) -> None:
        self.count, self.busy, self.lost = count, False, 0  # busy: until a wait gives up
        self.reserved = list[int]()  # memory of actors

    def is_initialized(self) -> bool:
        """Return that there is a connection."""
        return True

    def nodes(self) -> list[dict[str, Any]]:
        """Describe the machines."""

        def node(cpus: int) -> dict[str, Any]:
            has = {"CPU": cpus, "memory": 1 << 30}
            name = f"host{cpus}"
            return {"NodeID": name, "NodeManagerHostname": name, "Alive": True, "Resources": has}

        return [node(number + 1) for number in range(self.count)]

    def remote(self, cls: type) -> Any:
        """Return what starts actors."""
        made = SimpleNamespace(remote=lambda work, cpus: Actor(cls(work, cpus)))

        def options(memory: int, **_: object) -> SimpleNamespace:
            self.reserved.append(memory)
            return made

        return SimpleNamespace(options=options)

    def wait(
        self, calls: Sequence[Call], num_returns: int, timeout: float | None = None
    ) -> tuple[Sequence[Call], Sequence[Call]]:
        """Return the calls that are done: all, or none while other work keeps machines busy."""
        if self.busy:
            assert timeout, "waits without end"
            self.busy = False
            return [], calls
        return calls[:num_returns], calls[num_returns:]

    def get(self, call: Call) -> Any:
        """Compute a call; the first `lost` ones with a result are lost."""
        try:
            found = call.run()
        except Exception as error:
            raise RayTaskError(error) from error
        if found is not None and self.lost:
            self.lost -= 1
            raise LostError
        return found

    def kill(self, actor: Actor) -> None:
        """End an actor."""
