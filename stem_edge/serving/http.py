"""Bodies of requests and responses, as HTTP carries them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stem_edge.serving.bodies import decoded
from stem_edge.serving.refusals import RefusalError

T = TypeVar("T")
MOST_VALUES = 1 << 18  # of JSON, roughly; each takes up to 120 bytes


async def read(request: Request, kind: type[T]) -> T:
    """Return the body of a request as a struct. Raises RefusalError that names the field."""
    body = await request.body()
    if (found := sum(map(body.count, (b",", b"[", b"{")))) > MOST_VALUES:
        raise RefusalError(
            f"the body has {found:,} of , [ and {{, those in texts counted; expected at most "
            f"{MOST_VALUES:,}; send less"
        )
    return decoded(body, kind)


def json_response(data: object) -> Response:
    """Return a response of JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")
