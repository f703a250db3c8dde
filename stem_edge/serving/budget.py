"""What requests may take beside the model: bodies, their JSON, texts on their way to tokens, grammars."""

from __future__ import annotations

from stem_edge.errors import InputError
from stem_edge.runtime.model import Model
from stem_edge.system.memory import own_memory, return_freed_memory
from stem_edge.units import format_size, parse_size

REQUESTS_NBYTES = 64 << 20


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
