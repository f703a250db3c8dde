"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.answers.events import AnswerEvent, End, Text, Thought
from stem_edge.answers.openai.chat import ChatBody, completion
from stem_edge.answers.openai.shapes import DONE, head, usage
from stem_edge.serving.http import read, respond
from stem_edge.serving.metrics import timings
from stem_edge.serving.reply import Reply, merged
from stem_edge.serving.service import Service, service_of
from stem_edge.serving.streams import event
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    body = await read(request, ChatBody)
    with_usage, each = body.with_usage, bool(body.timings_per_token)
    service.compute.check(body.count)
    model = service.model
    requests, reader = await service.in_thread(lambda: body.prepared(model), service.prompts)
    replies = service.compute.submit(requests, reader)
    stream = _Stream(service, replies, with_usage=with_usage, each=each)
    events = stream.events() if body.stream else None
    return await respond(request, replies, events, lambda: _whole(service, replies))


async def _whole(service: Service, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return all answers as one object."""
    found = [await each.whole() for each in replies]
    requests = [reply.request for reply in replies]
    # In a thread: thousands of tokens' texts, if log probabilities are asked for.
    body = await service.in_thread(
        lambda: completion(service.name, found, requests, service.token_texts), service.answers
    )
    return body | {"timings": timings(service.model, replies[0])}


class _Stream:
    """Chunks of answers as they come. each: with figures, which the last chunks always have."""

    def __init__(
        self, service: Service, replies: Sequence[Reply], *, with_usage: bool, each: bool
    ) -> None:
        self._service, self._replies, self._each = service, replies, each
        self._head = head(service.name, "chatcmpl", "chat.completion.chunk")
        self._with_usage = with_usage

    async def events(self) -> AsyncGenerator[bytes]:
        begun = set[int]()
        async for index, piece in merged(self._replies):
            if index not in begun:
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": None}, first=True)
            if (data := await self._made(index, piece)) is not None:
                yield data
        if self._with_usage:
            requests = [reply.request for reply in self._replies]
            figures = {"timings": timings(self._service.model, self._replies[0])}
            counts = {"choices": [], "usage": usage(requests, len(requests))}
            yield event(self._head | counts | figures)
        yield DONE

    async def _made(self, index: int, piece: AnswerEvent) -> bytes | None:
        """Return an event; in a thread if it has the texts of many tokens."""
        if isinstance(piece, Text) and piece.logprobs:
            service = self._service
            return await service.in_thread(lambda: self._of(index, piece), service.answers)
        return self._of(index, piece)

    def _of(self, index: int, piece: AnswerEvent) -> bytes | None:
        match piece:
            case Thought(text):
                return self._chunk(index, {"reasoning_content": text})
            case Text(text, found):
                logprobs = None if found is None else self._service.token_texts.chat_logprobs(found)
                return self._chunk(index, {"content": text}, logprobs)
            case CallBegin(number, id_, name):
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": id_, "type": "function", "function": function}
                return self._chunk(index, {"tool_calls": [call]})
            case CallArguments(number, text):
                call = {"index": number, "function": {"arguments": text}}
                return self._chunk(index, {"tool_calls": [call]})
            case End(reason):
                return self._chunk(index, {}, reason=reason)
        return None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        *,
        first: bool = False,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = self._head | {"choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        if (self._each and not first) or reason is not None:
            chunk["timings"] = timings(self._service.model, self._replies[index])
        return event(chunk)


ROUTES = (Route("/v1/chat/completions", chat, methods=["POST"]),)
