"""The server as an ASGI program."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from stem_edge.apps.serving.access import LOCAL_ORIGIN, LOCALHOST, Access
from stem_edge.apps.serving.compute import END_SECONDS, Compute
from stem_edge.apps.serving.http import tell_error
from stem_edge.apps.serving.routes import chat, completions, pages, state
from stem_edge.apps.serving.service import Service
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.runtime.backends.options import check_sequences
from stem_edge.runtime.model import Model
from stem_edge.shown import shown

# Errors that `tell_error` handles. Starlette also logs unexpected ones, with a traceback.
TOLD = (StemEdgeError, ClientDisconnect, HTTPException, Exception)
# Origins as browsers send them. An origin in another form would never match a page.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#]+|null|localhost|\*")
ROUTES = (*state.ROUTES, *chat.ROUTES, *completions.ROUTES, *pages.ROUTES)


def app(
    model: Model | Callable[[], Model],
    *,
    name: str | None = None,
    sequences: int = 8,
    waiting: int = 64,
    api_key: str | None = None,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
) -> Starlette:
    """Return a program that serves a model; run it with any ASGI server, or mount it in a program.

    model: a loaded model, which the caller closes; or a function that loads a model. The compute thread
        calls the function, and closes its model when the server ends.
    name: name of the model for clients. Default: the name of the bundle's folder.
    sequences: largest number of answers computed together, see Model.generate_many.
    waiting: largest number of queued requests; further requests get status 429.
    api_key: key that clients must send; None: no key.
    hosts: names of this server in addition to localhost and IP addresses; "*": any name.
    origins: origins of other web pages that may send requests, like https://example.org; "localhost":
        pages of this machine; "*": any page.

    The model is loaded when the server starts, or at the first request if the program is mounted. To end a
    mounted program, call `program.state.service.compute.end()`. Raises InputError.
    """
    check_sequences(sequences)
    if waiting < 0:
        raise InputError(f"waiting is {waiting}; expected at least 0")
    if api_key == "":  # such as an environment variable that is not set
        raise InputError("api_key is empty; give a key, or None to let everybody ask")
    if isinstance(hosts, str) or isinstance(origins, str):
        raise InputError("hosts and origins are lists of names; put a single one into a list, too")
    names, others = tuple(map(str.lower, hosts)), tuple(origins)
    if wrong := [each for each in others if not ORIGIN.fullmatch(each)]:
        raise InputError(
            f"origins: {shown(wrong[0])} is none; give one like https://example.org, localhost, or *"
        )
    load = model if callable(model) else lambda: nullcontext(model)
    compute = Compute(load, sequences=sequences, waiting=waiting)
    service = Service(compute, name, api_key, names, others)
    program = Starlette(
        routes=ROUTES,
        middleware=_middleware(service),
        exception_handlers=dict.fromkeys(TOLD, tell_error),
        lifespan=_lifespan,
    )
    program.state.service = service
    return program


def _middleware(service: Service) -> list[Middleware]:
    access = Middleware(Access, service=service)
    if not service.origins:
        return [access]
    # First in the list, so that web pages can also read responses with errors.
    elsewhere = Middleware(
        CORSMiddleware,
        allow_origins=service.origins,
        allow_origin_regex=LOCAL_ORIGIN.pattern if LOCALHOST in service.origins else None,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    return [elsewhere, access]


@asynccontextmanager
async def _lifespan(program: Starlette) -> AsyncIterator[None]:
    compute: Compute = program.state.service.compute
    compute.start()
    try:
        yield
    finally:
        await to_thread.run_sync(compute.end, END_SECONDS)
