"""The answers to a turn, as they begin."""

from __future__ import annotations

from stem_edge.serving.answers import Answering, Answers
from stem_edge.serving.service import Service
from stem_edge.serving.turn import Turn, prepare


async def begin(service: Service, turn: Turn, count: int = 1) -> Answers:
    """Queue a turn, `count` times with seeds that follow each other; enter the result at once.

    Raises InputError for a turn that the model cannot take, and what Compute.submit raises.
    """
    service.compute.check(count)
    model = service.model
    prepared = await service.in_thread(lambda: prepare(model, turn, count), service.prompts)
    replies = service.compute.submit(prepared.requests)
    return Answers([Answering(reply, prepared.parser()) for reply in replies])
