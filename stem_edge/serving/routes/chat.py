"""Chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.answers.events import AnswerEvent, End, Text, Thought
from stem_edge.answers.openai.chat import ChatBody, completion
from stem_edge.answers.openai.shapes import DONE, head, usage
from stem_edge.serving.http import read, respond
from stem_edge.serving.metrics import timings
from stem_edge.serving.reply import TurnAnswers, merged
from stem_edge.serving.service import Service, service_of
from stem_edge.serving.streams import event
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    body = await read(request, ChatBody)
    turn, with_usage = body.turn(service.model), body.with_usage
    answers = await service.begin(turn, body.count)
    each = bool(body.timings_per_token)
    stream = _Stream(service, answers, with_usage=with_usage, each=each)
    events = stream.events() if body.stream else None
    return await respond(request, answers, events, lambda: _whole(service, answers))


async def _whole(service: Service, answers: TurnAnswers) -> dict[str, Any]:
    """Return all answers as one object."""
    found = [await each.whole() for each in answers.all]
    requests = [answering.reply.request for answering in answers.all]
    # In a thread: thousands of tokens' texts, if log probabilities are asked for.
    body = await service.in_thread(
        lambda: completion(service.name, found, requests, service.token_texts), service.answers
    )
    return body | {"timings": timings(service.model, answers.first.reply)}


class _Stream:
    """Chunks of answers as they come. each: with figures, which the last chunks always have."""

    def __init__(
        self, service: Service, answers: TurnAnswers, *, with_usage: bool, each: bool
    ) -> None:
        self._service, self._answers, self._each = service, answers, each
        self._head = head(service.name, "chatcmpl", "chat.completion.chunk")
        self._with_usage = with_usage

    async def events(self) -> AsyncGenerator[bytes]:
        answers, begun = self._answers.all, set[int]()
        async for index, piece in merged(answers):
            if index not in begun:
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": None}, first=True)
            if (data := await self._made(index, piece)) is not None:
                yield data
        if self._with_usage:
            requests = [answering.reply.request for answering in answers]
            figures = {"timings": timings(self._service.model, answers[0].reply)}
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
            chunk["timings"] = timings(self._service.model, self._answers.all[index].reply)
        return event(chunk)


ROUTES = (Route("/v1/chat/completions", chat, methods=["POST"]),)
