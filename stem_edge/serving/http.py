"""Bodies of requests and responses, as HTTP carries them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stem_edge.serving.bodies import decoded
from stem_edge.serving.budget import Share

T = TypeVar("T")


async def read(request: Request, kind: type[T]) -> T:
    """Return the body of a request as a struct. Raises RefusalError, which names the field at fault."""
    body = await request.body()
    share: Share = request.scope["share"]
    share.add_json(body)
    return decoded(body, kind)


def json_response(data: object) -> Response:
    """Return a response of JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")
