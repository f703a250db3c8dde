"""The models that are served: one."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stem_edge.serving.refusals import NotFoundError
from stem_edge.serving.service import Service, service_of


async def models(request: Request) -> Response:
    """List the model."""
    return JSONResponse({"object": "list", "data": [_described(service_of(request))]})


async def model(request: Request) -> Response:
    """Describe the model, if it has the name asked for."""
    service, name = service_of(request), request.path_params["name"]
    if name != service.name:
        raise NotFoundError(f"there is no model {name!r} here; this is {service.name!r}", "model")
    return JSONResponse(_described(service))


def _described(service: Service) -> dict[str, Any]:
    model = service.model
    about = {
        "n_vocab": model.config.vocab_size,
        "n_ctx": model.plan.context_length,
        "n_ctx_train": model.config.max_context,
    }
    described = {"id": service.name, "object": "model", "created": service.created}
    return described | {"owned_by": "stem-edge", "meta": about}


ROUTES = (Route("/v1/models", models), Route("/v1/models/{name:path}", model))
