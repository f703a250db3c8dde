"""Route of chat completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.apps.answers.openai.chat import ChatBody
from stem_edge.apps.serving.http import read, respond
from stem_edge.apps.serving.service import service_of


async def chat(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, ChatBody)
    service.compute.check(body.count)
    model, texts = service.model, service.token_texts
    asked = await service.run(lambda: body.asked(model, texts), service.prompts)
    replies = service.compute.submit(asked.requests, request.scope["hold"], asked.reader)
    return await respond(request, service, asked, replies)


ROUTES = (Route("/v1/chat/completions", chat, methods=["POST"]),)
