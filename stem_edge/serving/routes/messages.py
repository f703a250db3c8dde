"""The paths of Anthropic's Messages interface."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.answers.anthropic.body import Body, Conversation
from stem_edge.answers.anthropic.conversation import sampling_of, turn_of
from stem_edge.answers.anthropic.message import AnswerMessage
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.serving.http import json_response, read, respond_growing
from stem_edge.serving.service import service_of


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    service, body = service_of(request), await read(request, Body)
    params = sampling_of(service.model, body)
    answers = await service.begin(turn_of(body, params))
    message = AnswerMessage(service.name)
    return await respond_growing(request, answers, message, stream=body.stream)


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens that a conversation has."""
    service, body = service_of(request), await read(request, Conversation)
    count = await service.count_tokens(turn_of(body, SamplingParams()))
    return json_response({"input_tokens": count})


ROUTES = (
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
)
