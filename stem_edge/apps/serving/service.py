"""State that all routes share: the model, settings, and threads for work on requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

from anyio import CapacityLimiter, to_thread
from starlette.requests import HTTPConnection

from stem_edge.apps.answers.token_texts import TokenTexts
from stem_edge.apps.serving.compute import Compute
from stem_edge.apps.serving.reply import Reply
from stem_edge.bundle.hub.names import shown_name
from stem_edge.runtime.model import Model
from stem_edge.system.memory import own_memory

T = TypeVar("T")


@dataclass
class Service:
    """The served model and the server's settings."""

    compute: Compute
    given_name: str | None = None  # of the model
    key: str | None = None  # API key; None: not needed
    hosts: tuple[str, ...] = ()  # names of this server in addition to localhost; "*": any
    origins: tuple[str, ...] = ()  # of other web pages that may send requests (CORS); "*": any
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Limit the threads that tokenize prompts, and those that format answers."""
        self.prompts, self.answers = CapacityLimiter(2), CapacityLimiter(1)

    async def run(self, work: Callable[[], T], threads: CapacityLimiter) -> T:
        """Run work in one of the threads, which then gives freed memory back."""

        def done() -> T:
            try:
                return work()
            finally:
                self.compute.give_back()

        return await to_thread.run_sync(done, limiter=threads)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.model)

    def timings(self, reply: Reply) -> dict[str, float]:
        """Return statistics of an answer so far: times in milliseconds, sizes in bytes.

        Row cache hits, misses and bytes read also include answers computed at the same time.
        """
        request, before, now = reply.request, reply.counters, self.compute.counters
        computed = request.prompt_tokens - request.cached_tokens
        return {
            "prompt_n": computed,
            "cache_n": request.cached_tokens,
            "prompt_ms": request.prompt_seconds * 1e3,
            "prompt_per_second": _rate(computed, request.prompt_seconds),
            "predicted_n": request.new_tokens,
            "predicted_ms": request.decode_seconds * 1e3,
            "predicted_per_second": _rate(request.new_tokens - 1, request.decode_seconds),
            "row_hits": now.hits - before.hits,
            "row_misses": now.misses - before.misses,
            "flash_bytes": now.bytes_read - before.bytes_read,
            "memory_bytes": own_memory(),
            "memory_limit": self.compute.memory_limit,
        }

    @cached_property
    def name(self) -> str:
        """Name of the model, as clients see it. Raises RefusalError until it is loaded."""
        return self.given_name or shown_name(self.model.bundle.path)

    @property
    def model(self) -> Model:
        return self.compute.model


def service_of(connection: HTTPConnection) -> Service:
    return cast(Service, connection.app.state.service)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
