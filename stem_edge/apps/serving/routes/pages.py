"""The chat page: its files, which are part of the package."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.apps.serving.http import path_in

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, no script or style inside the page, no frames around it: text of a model
# cannot run or send anything out.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # kept, but asked about each time, because a newer version may run
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _paths() -> dict[str, Path]:
    """Return URL path -> file of the chat page."""
    files = (path for path in sorted(FOLDER.rglob("*")) if path.is_file())
    found = {f"/{path.relative_to(FOLDER).as_posix()}": path for path in files}
    return found | ({"/": FOLDER / INDEX} if f"/{INDEX}" in found else {})


PATHS = _paths()


async def page(request: Request) -> Response:
    """Return a file of the page, or status 304 if the browser has it."""
    path = PATHS[path_in(request.scope)]
    data = path.read_bytes()
    headers = HEADERS | {"etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=TYPES.get(path.suffix, "text/plain"), headers=headers)


ROUTES = tuple(Route(path, page) for path in PATHS)
