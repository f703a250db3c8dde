"""Routes of the chat page, whose files are part of this package."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.apps.serving.http import path_in

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
# Only files of this server, no inline scripts or styles, no frames around the page: text of a model
# cannot run code or send data out.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # cached, but checked each time, because the server may be newer
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
# URL path -> file of the chat page.
_FILES = (path for path in sorted(FOLDER.rglob("*")) if path.is_file())
PATHS = {f"/{path.relative_to(FOLDER).as_posix()}": path for path in _FILES}
PATHS["/"] = FOLDER / "index.html"


async def page(request: Request) -> Response:
    """Return a file of the page, or status 304 if the browser has it."""
    path = PATHS[path_in(request.scope)]
    data = path.read_bytes()
    headers = HEADERS | {"etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=TYPES.get(path.suffix, "text/plain"), headers=headers)


ROUTES = tuple(Route(path, page) for path in PATHS)
