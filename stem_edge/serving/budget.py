"""What requests may take beside the model: bodies, their JSON, texts on their way to tokens, grammars."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.answers.refusals import BusyError, RefusalError
from stem_edge.errors import InputError
from stem_edge.runtime.model import Model
from stem_edge.system.memory import own_memory, return_freed_memory
from stem_edge.units import format_size, parse_size

REQUESTS_NBYTES = 64 << 20
BODIES = 2  # of the largest, that may be held at a time
MOST_VALUES = 1 << 17  # of a request's JSON, roughly
VALUE_NBYTES = 120  # that each takes at most, roughly
# Of small bodies and values of JSON: held beside large ones, so that large ones do not block them.
SMALL_NBYTES = 1 << 16
SMALL_TOGETHER = 4 << 20  # of such values


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
class Held:
    """Bytes of all requests that are not answered. most: of bodies, while a large one comes."""

    most: int
    bodies: int = 0
    values: int = 0  # that their JSON became


class Share:
    """What one request holds."""

    def __init__(self, held: Held) -> None:
        self._held, self.body, self._values = held, 0, 0

    def add_body(self, nbytes: int) -> None:
        """Hold more of the body. Raises BusyError if there are too many large ones."""
        self.body += nbytes
        self._held.bodies += nbytes
        if nbytes and self.body > SMALL_NBYTES and self._held.bodies > self._held.most:
            raise BusyError("other large requests are being answered; try again in a moment")

    def add_json(self, body: bytes) -> None:
        """Hold what a body becomes. Raises RefusalError for too many values, BusyError for those of all."""
        values = sum(map(body.count, (b",", b"[", b"{")))
        if values > MOST_VALUES:
            raise RefusalError(
                f"the body has {values:,} of , [ and {{, those in texts counted; expected at most "
                f"{MOST_VALUES:,}; send less"
            )
        nbytes = values * VALUE_NBYTES
        most = MOST_VALUES * VALUE_NBYTES + (nbytes <= SMALL_NBYTES) * SMALL_TOGETHER
        if self._held.values + nbytes > most:
            raise BusyError(
                "other requests with much JSON are being answered; try again in a moment"
            )
        self._values = nbytes
        self._held.values += nbytes

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._held.bodies -= self.body
        self._held.values -= self._values
        self.body = self._values = 0
