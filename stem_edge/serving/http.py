"""Bodies of requests and responses, and errors as responses in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from stem_edge.answers.refusals import (
    FailedError,
    MethodRefusedError,
    NotFoundError,
    RefusalError,
    decoded,
    openai_error,
    public,
    status_of,
)
from stem_edge.errors import StemEdgeError
from stem_edge.serving.budget import Share
from stem_edge.serving.reply import Reply
from stem_edge.serving.streams import ClientLeftError, EventStream, until_disconnected

T = TypeVar("T")
CLIENT_LEFT = 499  # nginx's status; only a log sees it


async def read(request: Request, kind: type[T]) -> T:
    """Return the body of a request as a struct. Raises RefusalError, which names the field at fault."""
    body = await request.body()
    share: Share = request.scope["share"]
    share.add_json(body)
    return decoded(body, kind)


def json_response(data: object) -> Response:
    """Return a response of JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")


async def respond(
    request: Request,
    replies: Sequence[Reply],
    events: AsyncGenerator[bytes] | None,
    whole: Callable[[], Coroutine[Any, Any, object]],
) -> Response:
    """Return answers as a stream if there are events, else as one object."""
    held = ExitStack()
    for reply in replies:
        held.callback(reply.close)
    if events is not None:
        return EventStream(events, held)
    with held:
        return json_response(await until_disconnected(request, whole()))


def error_response(error: StemEdgeError) -> Response:
    """Return the response for an error."""
    headers = {}
    if isinstance(error, RefusalError) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(openai_error(error), status_of(error), headers)


def path_in(scope: Any) -> str:
    """Return the path of a request inside this program, wherever that is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root else path


async def tell_error(request: Request, error: Exception) -> Response:
    """Respond to what a route raised."""
    if isinstance(error, ClientLeftError | ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        response = error_response(_of_router(request, error))
        response.headers.update(error.headers or {})
        return response
    # What is no StemEdgeError is logged by Starlette.
    return error_response(public(error) if isinstance(error, StemEdgeError) else FailedError())


def _of_router(request: Request, error: HTTPException) -> RefusalError:
    path = path_in(request.scope)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NotFoundError(f"there is no {path} here")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodRefusedError(f"{path} has no method {request.method}")
    return RefusalError(str(error.detail))
