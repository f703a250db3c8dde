"""Bodies of requests and responses, as HTTP carries them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stem_edge.serving.bodies import decoded

T = TypeVar("T")


async def read(request: Request, kind: type[T]) -> T:
    """Return the body of a request as a struct. Raises RefusalError that names the field."""
    return decoded(await request.body(), kind)


def json_response(data: object) -> Response:
    """Return a response of JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")
