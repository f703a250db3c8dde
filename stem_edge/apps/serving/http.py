"""Request bodies, responses, event streams, and clients that disconnect."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, closing
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stem_edge.apps.answers.events import AnswerEvent, End
from stem_edge.apps.answers.openai.chat import AskedChat
from stem_edge.apps.answers.openai.completion import Asked
from stem_edge.apps.answers.openai.options import DONE, RefusedFields, head, refuse, usage
from stem_edge.apps.answers.refusals import RefusalError, failed, openai_error, public
from stem_edge.apps.serving.reply import Replies
from stem_edge.apps.serving.service import Service
from stem_edge.errors import StemEdgeError

T = TypeVar("T")
CLIENT_LEFT = 499  # nginx's status; only a log sees it
VALUE_NBYTES = 120  # memory of one JSON value, at most, roughly
# How messages of msgspec name a field.
PLACE = re.compile(r" - at `\$\.?(.*)`$")
MISSING = re.compile(r"missing required field `(.*?)`")
COMMENT = b":\n\n"  # an event that clients skip
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


async def read(request: Request, kind: type[T]) -> T:
    """Return a request's body as a struct `kind`. A RefusalError names the wrong field."""
    body = await request.body()
    request.scope["hold"](VALUE_NBYTES * sum(map(body.count, (b",", b"[", b"{"))))
    refuse(decoded(body, RefusedFields))
    return decoded(body, kind)


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct. A RefusalError names the wrong field.

    Fields accept 40.0, which some clients write for 40, but also "40", "false" and "null".
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        place = PLACE.search(str(error)) or MISSING.search(str(error))
        param = place[1] if place is not None else None
        message = PLACE.sub("", str(error))
        raise RefusalError(f"{param}: {message}" if param else message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusalError(f"the body cannot be read as JSON: {error}") from None


async def respond(
    request: Request, service: Service, asked: AskedChat | Asked, replies: Replies
) -> Response:
    """Respond with the answers: as server-sent events if the request has "stream", else as JSON."""
    if asked.body.stream:
        return EventStream(_chunks(service, asked, replies), replies)
    with closing(replies):
        whole = await until_left(request, _whole(service, asked, replies))
    return Response(msgspec.json.encode(whole), media_type="application/json")


async def _whole(service: Service, asked: AskedChat | Asked, replies: Replies) -> dict[str, Any]:
    """Wait for all answers; return them as one JSON object."""
    found = await replies.whole()
    figures = {"timings": service.timings(replies.made[0])} if found else {}
    # In a thread, because log probabilities may need the texts of thousands of tokens.
    choices = await service.run(lambda: asked.whole(found), service.answers)
    body = {"choices": choices, "usage": usage(asked.requests, asked.body.count)}
    return head(service.name, asked.id_prefix, asked.kind) | body | figures


async def _chunks(
    service: Service, asked: AskedChat | Asked, replies: Replies
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream; the last event of each answer contains its timings."""
    body, base = asked.body, head(service.name, asked.id_prefix, asked.chunk_kind)
    base |= {"usage": None} if body.with_usage else {}
    for number in () if asked.generates else range(len(asked.requests)):
        for choice in await _choices(service, asked, number, End("length")):
            yield event(base | {"choices": [choice]})
    async for found in replies.events():
        if found is None:
            yield COMMENT
            continue
        *first, last = await _choices(service, asked, *found)
        for choice in first:
            yield event(base | {"choices": [choice]})
        each = body.timings_per_token or last["finish_reason"] is not None
        figures = {"timings": service.timings(replies.made[found[0]])} if each else {}
        yield event(base | {"choices": [last]} | figures)
    if body.with_usage:
        yield event(base | {"choices": [], "usage": usage(asked.requests, body.count)})
    yield DONE


async def _choices(
    service: Service, asked: AskedChat | Asked, number: int, piece: AnswerEvent
) -> list[dict[str, Any]]:
    """Convert an event of an answer to OpenAI's choices; a thread formats log probabilities."""
    if asked.body.logprobs is None or asked.body.logprobs is False:
        return asked.choices(number, piece)
    return await service.run(lambda: asked.choices(number, piece), service.answers)


def event(data: object) -> bytes:
    """Encode data as JSON in a server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events; answers are cancelled as soon as their client leaves."""

    def __init__(self, events: AsyncGenerator[bytes], replies: Replies) -> None:
        super().__init__(_with_error(events), 200, STREAM_HEADERS, "text/event-stream")
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._replies):
            try:
                await super().__call__(scope, receive, send)
            except (ClientDisconnect, OSError):  # servers since ASGI 2.4
                return


async def _with_error(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the events; if an error ends them, yield it as the last event."""
    async with aclosing(events):
        try:
            async for data in events:
                yield data
        except Exception as error:
            yield event(openai_error(public(error)))


async def until_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnect if the client disconnects.

    The body of the request must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:  # wait until both have freed what they hold
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: RefusalError) -> Response:
    headers = {"retry-after": "1"} if error.retry else {}
    return JSONResponse(openai_error(error), error.status, headers)


def path_in(scope: Any) -> str:
    """Return a request's path relative to this program, which may be mounted in another."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root else path


async def tell_error(request: Request, error: Exception) -> Response:
    """Exception handler: respond with an error body."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        response = error_response(_of_router(request, error))
        response.headers.update(error.headers or {})
        return response
    # Starlette logs all errors that are not a StemEdgeError.
    return error_response(public(error) if isinstance(error, StemEdgeError) else failed())


def _of_router(request: Request, error: HTTPException) -> RefusalError:
    path = path_in(request.scope)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return RefusalError(f"{path} has no method {request.method}", status=405)
    return RefusalError(f"there is no {path} here; try /v1/chat/completions", status=404)
