"""Memory that requests may take in addition to the model."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.answers.refusals import BusyError, RefusalError
from stem_edge.errors import InputError
from stem_edge.runtime.model import Model
from stem_edge.system.memory import own_memory, return_freed_memory
from stem_edge.units import format_size, parse_size

REQUESTS_NBYTES = 64 << 20
MOST_VALUES = 1 << 17  # of a request's JSON, roughly
VALUE_NBYTES = 120  # that each takes at most, roughly
TOGETHER_NBYTES = 24 << 20  # of the bodies of all requests and their JSON
SMALL_NBYTES = 64 << 10  # a request that takes less is never refused because of others


def memory_limit(model: Model) -> int:
    """Return the most anonymous memory of a process that serves a model."""
    return model.plan.total + REQUESTS_NBYTES


def give_back(model: Model) -> None:
    """Give freed memory back to the system if the model's plan needs it."""
    if own_memory() > model.plan.total:
        return_freed_memory()


def of_model(memory: int | str | None) -> int | None:
    """Return what the limit of a server leaves for its model. Raises InputError if that is nothing."""
    if memory is None:
        return None
    left = parse_size(memory) - REQUESTS_NBYTES
    if left <= 0:
        needed = format_size(REQUESTS_NBYTES, up=True)
        raise InputError(
            f"--memory is {memory}; requests take {needed} of it, so give more than that for the model"
        )
    return left


@dataclass
class Budget:
    """Bytes that all requests hold until they are answered."""

    held: int = 0


class Share:
    """Bytes that one request holds."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.held = budget, 0

    def add(self, nbytes: int) -> None:
        """Hold more. Raises BusyError if requests hold too much together."""
        self.held += nbytes
        self._budget.held += nbytes
        if nbytes and self.held > SMALL_NBYTES and self._budget.held > TOGETHER_NBYTES:
            raise BusyError("other large requests are being answered; try again in a moment")

    def add_json(self, body: bytes) -> None:
        """Hold what a body becomes. Raises RefusalError for too many values, and BusyError."""
        values = sum(map(body.count, (b",", b"[", b"{")))
        if values > MOST_VALUES:
            raise RefusalError(
                f"request too complex: about {values:,} JSON values, limit {MOST_VALUES:,}; send less"
            )
        self.add(values * VALUE_NBYTES)

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._budget.held -= self.held
        self.held = 0
