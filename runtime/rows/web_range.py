"""A range of a file on a web server, with bounds on what it sends and on how long it says nothing."""

from __future__ import annotations

from typing import Any

LIMIT_SECONDS = 300.0  # of a request, however slow the line
PARTIAL = 206  # the status of an answer that is a range


async def read_range(files: Any, url: str, start: int, stop: int, silence: float) -> bytes:
    """Read bytes from `start` on and before `stop`, fewer only at the file's end.

    files: fsspec's file system for the web. silence: seconds without a byte that end the request.
    Raises what aiohttp does, FileNotFoundError, and NotImplementedError if ranges are not served, of
    which nothing has been read then.
    """
    import aiohttp

    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    options = files.kwargs | {
        "headers": files.kwargs.get("headers", {}) | headers,
        "timeout": aiohttp.ClientTimeout(LIMIT_SECONDS, sock_connect=silence, sock_read=silence),
    }
    session = await files.set_session()
    async with session.get(files.encode_url(url), **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        if answer.status != PARTIAL:
            raise NotImplementedError(
                f"status {answer.status} for a range: this server serves no ranges"
            )
        found = bytearray()
        while piece := await answer.content.read(stop - start - len(found)):
            found += piece
        return bytes(found)
