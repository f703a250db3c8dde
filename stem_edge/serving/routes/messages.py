"""The paths of Anthropic's Messages interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stem_edge.answers.anthropic.body import Body, Conversation
from stem_edge.answers.anthropic.conversation import sampling_of, turn_of
from stem_edge.answers.anthropic.message import AnswerMessage, Event, usage_of
from stem_edge.answers.events import AnswerEvent, End, Text
from stem_edge.answers.refusals import anthropic_error
from stem_edge.answers.turn import count_tokens as count_prompt
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.serving.http import read
from stem_edge.serving.reply import Answering
from stem_edge.serving.service import service_of
from stem_edge.serving.streams import EventStream, event, until_disconnected
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin, CallEnd


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    service, body = service_of(request), await read(request, Body)
    params = sampling_of(body, service.model.plan.context_length)
    answers = await service.begin(turn_of(body, params))
    message = AnswerMessage(service.name)
    if body.stream:
        return EventStream(_events(answers.first, message), answers, _told)
    with answers:
        whole = await until_disconnected(request, _whole(answers.first, message))
    return JSONResponse(whole)


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens that a conversation has."""
    service, body = service_of(request), await read(request, Conversation)
    model, turn = service.model, turn_of(body, SamplingParams())
    count = await service.in_thread(lambda: count_prompt(model, turn), service.texts)
    return JSONResponse({"input_tokens": count})


async def _events(answering: Answering, message: AnswerMessage) -> AsyncGenerator[bytes]:
    begun = False
    async for piece in answering:
        if not begun:
            begun = True
            for each in (message.start(_usage(answering)), {"type": "ping"}):
                yield event(each, each["type"])
        for each in _grown(message, piece):
            yield event(each, each["type"])
        if isinstance(piece, End):
            for each in message.end(piece.reason, piece.stop, _usage(answering)):
                yield event(each, each["type"])


async def _whole(answering: Answering, message: AnswerMessage) -> Event:
    end = End("stop", None)
    async for piece in answering:
        _grown(message, piece)
        end = piece if isinstance(piece, End) else end
    return message.whole(end.reason, end.stop, _usage(answering))


def _grown(message: AnswerMessage, piece: AnswerEvent) -> Sequence[Event]:
    match piece:
        case Text(text) if text:
            return message.text(text)
        case CallBegin(_, call_id, name):
            return message.call(call_id, name)
        case CallArguments(_, text):
            return message.arguments(text)
        case CallEnd():
            return message.stop()
    return []


def _usage(answering: Answering) -> dict[str, int]:
    request = answering.reply.request
    return usage_of(request.prompt_tokens, request.cached_tokens, request.new_tokens)


def _told(error: StemEdgeError) -> bytes:
    return event(anthropic_error(error), "error")


ROUTES = (
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
)
