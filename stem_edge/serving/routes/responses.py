"""OpenAI's Responses interface, without its memory: the input has the whole conversation."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.answers.openai.responses_answer import AnswerItems
from stem_edge.answers.openai.responses_body import Body, check_supported
from stem_edge.answers.openai.responses_input import choice_of, format_of, messages_of, tools_of
from stem_edge.answers.turn import Turn, params_of
from stem_edge.runtime.model import Model
from stem_edge.serving.http import json_response, read, respond_growing
from stem_edge.serving.service import Service, service_of

NAMES = {"max_new_tokens": "max_output_tokens"}


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    service, body = service_of(request), await read(request, Body)
    turn = turn_of(service.model, body)
    answers = await service.begin(turn)
    items = AnswerItems(_echo(service, body, turn))
    return await respond_growing(request, answers, items, stream=bool(body.stream))


async def input_tokens(request: Request) -> Response:
    """Return the number of tokens that a conversation has."""
    service, body = service_of(request), await read(request, Body)
    count = await service.count_tokens(turn_of(service.model, body))
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def turn_of(model: Model, body: Body) -> Turn:
    """Return the conversation to answer. Raises RefusalError, InputError."""
    check_supported(body)
    choice, name = choice_of(body)
    held = model.plan.context_length
    params = params_of(
        model,
        NAMES,
        max_new_tokens=min(body.max_output_tokens or held, held),
        temperature=body.temperature,
        top_p=body.top_p,
        grammar=format_of(body),
    )
    return Turn(
        messages_of(body),
        params,
        grammar_field="text.format",
        tools=tools_of(body),
        tool_choice=choice,
        tool_name=name,
        parallel=body.parallel_tool_calls is not False,
    )


def _echo(service: Service, body: Body, turn: Turn) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    form = body.text.format if body.text is not None else None
    return {
        "model": service.name,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": turn.parallel,
        "temperature": turn.params.temperature,
        "top_p": turn.params.top_p,
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or []],
        "text": {"format": {"type": "text"} if form is None else msgspec.to_builtins(form)},
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
    }


ROUTES = (
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
)
