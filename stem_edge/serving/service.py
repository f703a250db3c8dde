"""What the routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import HTTPConnection

from stem_edge.runtime.model import Model
from stem_edge.serving.compute import Compute


@dataclass(frozen=True)
class Service:
    """A model that is served, and how."""

    compute: Compute
    name: str  # of the model, as clients see it
    key: str | None = None  # API key; None: nobody needs one
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")  # names that clients may use; "*": any
    origins: tuple[str, ...] = ()  # of pages elsewhere that may ask (CORS)
    body_nbytes: int = 16 << 20  # of the largest request
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> Model:
        """The model. Raises LoadingError until it is loaded."""
        return self.compute.model


def service_of(connection: HTTPConnection) -> Service:
    """Return the service of the program that handles a request."""
    return cast(Service, connection.app.state.service)
