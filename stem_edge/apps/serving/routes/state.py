"""Routes of health, properties of the model, and the list of models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import stem_edge
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.apps.serving.compute import UNUSABLE
from stem_edge.apps.serving.service import service_of
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.sampling import CONVERSATION, RANGES


async def health(request: Request) -> Response:
    """Respond 200 if the model can answer, or 503 with the reason."""
    compute = service_of(request).compute
    if compute.failure is not None:
        return JSONResponse({"status": "error", "error": UNUSABLE}, 503)
    if compute.draining:
        return JSONResponse({"status": "ending"}, 503)
    if compute.loaded is None:
        return JSONResponse({"status": "loading model"}, 503)
    return JSONResponse({"status": "ok"})


async def props(request: Request) -> Response:
    service = service_of(request)
    model, scheduler = service.compute.check(0)
    usual = model.chosen(SamplingParams(), CONVERSATION)
    return JSONResponse(
        {
            "model": service.name,
            "context_length": model.plan.context_length,
            "has_chat_template": model.has_chat_template,
            "tools": model.tool_family is not None,
            "engine": model.plan.engine,
            "memory_limit": service.compute.memory_limit,
            "build_info": stem_edge.__version__,
            "slots": scheduler.size,
            "sampling": {name: getattr(usual, name) for name in RANGES},
        }
    )


async def models(request: Request) -> Response:
    """Describe the model, in a list if the path names none. Raises RefusalError for another name."""
    service, name = service_of(request), request.path_params.get("name")
    model = service.model
    if name not in (None, service.name):
        told = f"there is no model {name!r} here; this is {service.name!r}"
        raise RefusalError(told, "model", status=404)
    about = {
        "n_vocab": model.config.vocab_size,
        "n_ctx": model.plan.context_length,
        "n_ctx_train": model.config.max_context,
    }
    described = {"id": service.name, "object": "model", "created": service.created}
    described |= {"owned_by": "stem-edge", "meta": about}
    return JSONResponse({"object": "list", "data": [described]} if name is None else described)


ROUTES = (
    Route("/health", health),
    Route("/props", props),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", models),
)
