"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.apps.answers.events import AnswerEvent, End, Text, Thought
from stem_edge.apps.answers.openai.chat import ChatBody, call_object, completion
from stem_edge.apps.answers.openai.options import DONE, head, usage
from stem_edge.apps.serving.http import COMMENT, event, read, respond
from stem_edge.apps.serving.reply import Replies
from stem_edge.apps.serving.service import Service, service_of
from stem_edge.text.tool_calls.parser import Call


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    body = await read(request, ChatBody)
    with_usage, each = body.with_usage, bool(body.timings_per_token)
    service.compute.check(body.count)
    model = service.model
    requests, reader = await service.prompts.run(lambda: body.prepared(model))
    replies = service.compute.submit(requests, reader)
    streamed = _events(service, replies, with_usage=with_usage, each=each)
    return await respond(request, replies, streamed if body.stream else _whole(service, replies))


async def _whole(service: Service, replies: Replies) -> dict[str, Any]:
    """Return all answers as one object."""
    found = await replies.whole()
    # In a thread: thousands of tokens' texts, if log probabilities are asked for.
    body = await service.answers.run(
        lambda: completion(service.name, found, replies.requests, service.token_texts)
    )
    return body | {"timings": service.timings(replies[0])}


async def _events(
    service: Service, replies: Replies, *, with_usage: bool, each: bool
) -> AsyncGenerator[bytes]:
    """Yield the chunks of a stream. each: all with figures, which the last ones always have."""
    base = head(service.name, "chatcmpl", "chat.completion.chunk")
    base |= {"usage": None} if with_usage else {}
    begun = set[int]()

    def chunk(index: int, delta: dict[str, Any], figures: bool, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        found = {"timings": service.timings(replies[index])} if figures else {}
        return event(base | {"choices": [choice]} | found)

    async for found in replies.events():
        if found is None:
            yield COMMENT
            continue
        index, piece = found
        if index not in begun:
            begun.add(index)
            yield chunk(index, {"role": "assistant", "content": None}, False)
        if isinstance(piece, End):
            yield chunk(index, {}, True, finish_reason=piece.reason)
        elif (delta := _delta(piece)) is not None:
            logprobs = piece.logprobs if isinstance(piece, Text) else None
            told = None if logprobs is None else service.token_texts.chat_logprobs(logprobs)
            yield chunk(index, delta, each, logprobs=told)
    if with_usage:
        requests = replies.requests
        counts = {"choices": [], "usage": usage(requests, len(requests))}
        yield event(base | counts | {"timings": service.timings(replies[0])})
    yield DONE


def _delta(piece: AnswerEvent) -> dict[str, Any] | None:
    match piece:
        case Thought(text):
            return {"reasoning_content": text}
        case Text(text):
            return {"content": text}
        case Call():
            return {"tool_calls": [{"index": piece.index} | call_object(piece)]}
    return None


ROUTES = (Route("/v1/chat/completions", chat, methods=["POST"]),)
