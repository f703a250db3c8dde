"""The paths of Ollama's interface."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.answers.events import AnswerEvents
from stem_edge.answers.growing import Told
from stem_edge.answers.ollama import NAMES, AnswerLines, Body, date
from stem_edge.answers.refusals import ollama_error
from stem_edge.answers.turn import Turn, check_grammar
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.sampling import CONVERSATION, RANGES
from stem_edge.serving.http import json_response, read
from stem_edge.serving.reply import TurnAnswer, TurnAnswers
from stem_edge.serving.service import Service, service_of
from stem_edge.serving.streams import EventStream, until_disconnected

VERSION = "0.12.0"  # of Ollama, whose interface this is; clients refuse old ones
FAMILY = "stem-edge"  # begins the names of a model's figures
LINES = "application/x-ndjson"


async def answer(request: Request, *, chat: bool) -> Response:
    """Answer a conversation or a prompt, or continue one that is raw."""
    service, body = service_of(request), await read(request, Body)
    turn, stream = body.turn(service.model), body.stream is not False
    lines = AnswerLines(service.name, chat=chat, stream=stream)
    if turn is None:
        return json_response(lines.line() | {"done": True, "done_reason": "load"})
    answers = await (_continued(service, turn) if body.raw and not chat else service.begin(turn))
    told = _told(answers.first, lines)
    if stream:
        sent, alive = (_line(each) async for each in told), _line(lines.line())
        return EventStream(sent, answers, _failed, alive, LINES)
    with answers:
        return json_response(await until_disconnected(request, anext(told)))


async def _continued(service: Service, turn: Turn) -> TurnAnswers:
    """Queue a prompt without a template."""
    model, params, text = service.model, turn.params, turn.messages[-1]["content"]
    service.compute.check(1)
    check_grammar(model, params, turn.grammar_field)
    made = await service.in_thread(lambda: model.request(text, params), service.prompts)
    return TurnAnswers([TurnAnswer(one, AnswerEvents()) for one in service.compute.submit([made])])


async def _told(answering: TurnAnswer, lines: AnswerLines) -> AsyncGenerator[Told]:
    async for event in answering:
        if (line := lines.add(event, answering.reply.request)) is not None:
            yield line


def _line(told: Told) -> bytes:
    return msgspec.json.encode(told) + b"\n"


def _failed(error: StemEdgeError) -> bytes:
    return _line(ollama_error(error))


async def version(request: Request) -> Response:
    """Return the version of the interface."""
    return json_response({"version": VERSION})


async def tags(request: Request) -> Response:
    """List the model."""
    service = service_of(request)
    bundle = service.model.bundle
    named = {"name": service.name, "model": service.name, **_about(service)}
    digest = hashlib.sha256(bundle.file(MANIFEST).read_bytes()).hexdigest()
    return json_response({"models": [named | {"size": bundle.manifest.nbytes, "digest": digest}]})


async def show(request: Request) -> Response:
    """Describe the model: how it chooses tokens, what it can do, and its sizes."""
    service = service_of(request)
    model, config = service.model, service.model.config
    usual = model.chosen(SamplingParams(), CONVERSATION)
    able = {"completion": True, "tools": model.tool_family, "thinking": model.chat.thoughts}
    sizes = {
        "context_length": model.plan.context_length,
        "embedding_length": config.dim,
        "block_count": config.n_layers,
    }
    counted = config.backbone_parameters + config.table_parameters
    general = {"general.architecture": FAMILY, "general.parameter_count": counted}
    chosen = [f"{NAMES.get(name, name)} {getattr(usual, name)}" for name in RANGES]
    about = {"parameters": "\n".join(chosen), "capabilities": [a for a in able if able[a]]}
    info = general | {f"{FAMILY}.{name}": size for name, size in sizes.items()}
    return json_response(_about(service) | about | {"model_info": info})


def _about(service: Service) -> Told:
    details = {"format": service.model.plan.engine, "family": FAMILY, "families": [FAMILY]}
    return {"modified_at": date(service.created), "details": details}


ROUTES = (
    Route("/api/version", version),
    Route("/api/tags", tags),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/chat", partial(answer, chat=True), methods=["POST"]),
    Route("/api/generate", partial(answer, chat=False), methods=["POST"]),
)
