"""Errors with an HTTP status, and their JSON bodies."""

from __future__ import annotations

import logging
from typing import Any

from stem_edge.errors import InputError, StemEdgeError
from stem_edge.shown import one_line

log = logging.getLogger(__name__)
BUSY, FAILED, UNAVAILABLE = 429, 500, 503
# HTTP status -> `type` in the error body, as OpenAI names it.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    BUSY: "rate_limit_error",
    FAILED: "server_error",
    UNAVAILABLE: "unavailable_error",
}


class RefusalError(StemEdgeError):
    """An HTTP error for the client. param: the wrong field. retry: if there is a Retry-After."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(one_line(message, 1000))  # it may quote the client's text
        self.param, self.status, self.retry = param, status, status in (BUSY, UNAVAILABLE)


def failed(message: str = "the server failed; its log says where") -> RefusalError:
    """Return an error of status 500. The default message hides details from clients."""
    return RefusalError(message, status=FAILED)


def public(error: Exception) -> RefusalError:
    """Convert an error to one that clients may see; log the details of an internal failure."""
    if isinstance(error, RefusalError | InputError):
        return refusal_of(error)
    log.error("%s", error, exc_info=None if isinstance(error, StemEdgeError) else error)
    return failed()


def refusal_of(error: StemEdgeError) -> RefusalError:
    """Convert an error to a RefusalError: status 400 for InputError, 500 for other errors."""
    if isinstance(error, RefusalError):
        return error
    return RefusalError(str(error)) if isinstance(error, InputError) else failed(str(error))


def openai_error(error: RefusalError) -> dict[str, Any]:
    """Return the JSON body of an error in OpenAI's form; streams send it as an event."""
    kind = KINDS.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": None}}
