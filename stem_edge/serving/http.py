"""Bodies of requests and responses, and errors as responses, in the form of the interface whose path was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from stem_edge.answers.growing import Growing, Told
from stem_edge.answers.refusals import (
    FailedError,
    MethodRefusedError,
    NotFoundError,
    RefusalError,
    anthropic_error,
    decoded,
    ollama_error,
    openai_error,
    public,
    status_of,
)
from stem_edge.errors import StemEdgeError
from stem_edge.serving.budget import Share
from stem_edge.serving.reply import TurnAnswers
from stem_edge.serving.streams import ClientLeftError, EventStream, event, until_disconnected

T = TypeVar("T")
# Where a path begins so -> the form of its errors: Anthropic's interface, and Ollama's.
FORMS = {"/v1/messages": anthropic_error, "/api": ollama_error}
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


def _openai_event(error: StemEdgeError) -> bytes:
    return event(openai_error(error))


async def respond(
    request: Request,
    answers: TurnAnswers,
    events: AsyncGenerator[bytes] | None,
    whole: Callable[[], Coroutine[Any, Any, object]],
    told: Callable[[StemEdgeError], bytes] = _openai_event,
) -> Response:
    """Return answers as a stream of events if there are some, or as one object.

    told: makes the event of an error.
    """
    if events is not None:
        return EventStream(events, answers, told)
    with answers:
        return json_response(await until_disconnected(request, whole()))


async def respond_growing(
    request: Request, answers: TurnAnswers, growing: Growing, *, stream: bool
) -> Response:
    """Return the first of some answers in a form that grows."""
    first = answers.first

    def sent(told: Told) -> bytes:
        return event(told, told["type"])

    def failed(error: StemEdgeError) -> bytes:
        return sent(growing.failed(error))

    async def events() -> AsyncGenerator[bytes]:
        for told in growing.start():
            yield sent(told)
        async for piece in first:
            for told in growing.add(piece, first.reply.request):
                yield sent(told)

    async def whole() -> Told:
        async for piece in first:
            growing.add(piece, first.reply.request)
        return growing.whole

    return await respond(request, answers, events() if stream else None, whole, failed)


def error_response(path: str, error: StemEdgeError) -> Response:
    """Return the response for an error of a request of a path (without a mount's)."""
    own = (form for begin, form in FORMS.items() if f"{path}/".startswith(f"{begin}/"))
    form = next(own, openai_error)
    headers = {}
    if isinstance(error, RefusalError) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(form(error), status_of(error), headers)


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
        response = error_response(path_in(request.scope), _of_router(request, error))
        response.headers.update(error.headers or {})
        return response
    # What is no StemEdgeError is logged by Starlette.
    told = public(error) if isinstance(error, StemEdgeError) else FailedError()
    return error_response(path_in(request.scope), told)


def _of_router(request: Request, error: HTTPException) -> RefusalError:
    path = path_in(request.scope)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NotFoundError(f"there is no {path} here")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodRefusedError(f"{path} has no method {request.method}")
    return RefusalError(str(error.detail))
