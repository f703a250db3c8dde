"""Access control: host names, origins, the API key, and sizes of requests."""

from __future__ import annotations

import hmac
import re
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stem_edge.apps.answers.openai.options import MOST_NBYTES
from stem_edge.apps.answers.refusals import BUSY, RefusalError
from stem_edge.apps.serving.http import error_response, path_in
from stem_edge.apps.serving.routes import pages
from stem_edge.apps.serving.service import Service

# Paths that need no key: monitoring uses /health, and people type their key into the page.
OPEN_PATHS = frozenset({"/health", *pages.PATHS})
HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]*?)\.?)(?::[0-9]*)?")
LOCALHOST = "localhost"
TOGETHER_NBYTES = 24 << 20  # of bodies, JSON and unsent answers of all requests
SMALL_NBYTES = 64 << 10  # a smaller request is never refused because of other requests
# What "localhost" means as an origin: pages of this machine, of whatever port.
LOCAL_ORIGIN = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]+)?")


class Access:
    """Middleware that checks every request, and loads the model at the first one.

    At startup, the server loads the model itself, but a mounted program gets no startup event.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._held = 0  # bytes of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = path_in(scope)
        try:
            check(self._service, path, Headers(scope=scope))
        except RefusalError as error:
            await error_response(error)(scope, receive, send)
            return
        self._service.compute.start()
        held = 0  # bytes of this request, until it is answered

        def hold(nbytes: int) -> None:
            nonlocal held
            held += nbytes
            self._held += nbytes
            if nbytes > 0 and held > SMALL_NBYTES and self._held > TOGETHER_NBYTES:
                raise RefusalError(
                    "requests and answers take too much memory; send less, ask for fewer or shorter "
                    "answers, for fewer log probabilities, or try again later",
                    status=BUSY if held <= TOGETHER_NBYTES else 413,
                )

        async def received() -> Message:
            message = await receive()
            nbytes = len(message.get("body", b""))
            if held + nbytes > MOST_NBYTES:
                raise RefusalError(
                    f"the body is larger than {MOST_NBYTES:,} bytes; send less", status=413
                )
            hold(nbytes)
            return message

        scope["hold"] = hold
        try:
            await self._app(scope, received, send)
        finally:
            self._held -= held


def check(service: Service, path: str, headers: Headers) -> None:
    """Raise a RefusalError if the headers of a request for `path` do not allow access."""
    host = headers.get("host", "")
    if not _is_ours(host, service.hosts):
        raise RefusalError(
            f"the header Host is {host[:200]!r}, which is no name of this server; ask by its address, "
            "or start it with --allow-host",
            status=403,
        )
    origin = headers.get("origin")
    if origin is not None and not _may_ask(origin, host, service.origins):
        raise RefusalError(
            f"pages of {origin[:200]!r} may not ask this server; start it with --cors-origin",
            status=403,
        )
    if service.key is not None and path not in OPEN_PATHS and not _has_key(headers, service.key):
        raise RefusalError(
            "this server needs its API key, as Authorization: Bearer KEY", status=401
        )
    if "transfer-encoding" in headers and "content-length" in headers:
        # A proxy in front of this server may use the other header to find the end.
        raise RefusalError("the request has Content-Length beside chunks; send one of them")


def _is_ours(host: str, names: tuple[str, ...]) -> bool:
    """Return True if a Host header names this server. The check prevents DNS rebinding.

    IP addresses always pass: an attacker can point a domain at this server's address, but browsers
    then send the domain as Host.
    """
    found = HOST.fullmatch(host)  # without port, brackets and a last dot
    name = (found[1] or found[2]).lower() if found is not None else ""
    with suppress(ValueError):
        ip_address(name)
        return True
    return "*" in names or name in (LOCALHOST, *names)


def _may_ask(origin: str, host: str, origins: tuple[str, ...]) -> bool:
    """Return True if pages of `origin` may send requests: this server's own, or in `origins`."""
    own = origin in (f"http://{host}", f"https://{host}")
    local = LOCALHOST in origins and LOCAL_ORIGIN.fullmatch(origin) is not None
    return own or local or "*" in origins or origin in origins


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # In constant time, so that timing does not reveal how much of the key is right.
    return hmac.compare_digest(token.strip().encode(), key.encode()) and scheme.lower() == "bearer"
