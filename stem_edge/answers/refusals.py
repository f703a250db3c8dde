"""HTTP errors, and error bodies."""

from __future__ import annotations

import logging
from typing import Any

from stem_edge.errors import InputError, StemEdgeError

log = logging.getLogger(__name__)


class RefusalError(StemEdgeError):
    """Base of refusals. status: of HTTP. kind: `type` in the body, in OpenAI's words."""

    status = 400
    kind = "invalid_request_error"
    retry_after: int | None = None  # seconds

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the field that is at fault


class KeyRefusedError(RefusalError):
    """No API key, or a wrong one."""

    status, kind = 401, "authentication_error"


class HostRefusedError(RefusalError):
    """A name for this server that it does not have: perhaps a page elsewhere asks."""

    status, kind = 403, "permission_error"


class NotFoundError(RefusalError):
    """No such path, or no such model."""

    status, kind = 404, "not_found_error"


class MethodRefusedError(RefusalError):
    """A path has no such method."""

    status = 405


class TooLargeError(RefusalError):
    """A body is larger than allowed."""

    status, kind = 413, "request_too_large"


class BusyError(RefusalError):
    """Too many requests wait."""

    status, kind, retry_after = 429, "rate_limit_error", 1


class LoadingError(RefusalError):
    """The model is not loaded yet."""

    status, kind, retry_after = 503, "unavailable_error", 1


class EndingError(RefusalError):
    """The server is ending."""

    status, kind = 503, "unavailable_error"


class FailedError(RefusalError):
    """Something failed here that is not the client's fault."""

    status, kind = 500, "server_error"

    def __init__(self, message: str = "the server failed; its log says where") -> None:
        super().__init__(message)  # by default without details, which are not for strangers


def public(error: Exception) -> StemEdgeError:
    """Return an error as clients may see it; details of a failure here stay in the log."""
    if isinstance(error, RefusalError | InputError):
        return error
    log.error("%s", error, exc_info=None if isinstance(error, StemEdgeError) else error)
    return FailedError()


def status_of(error: StemEdgeError) -> int:
    """Return the status of an error: 400 for what the client gave, 500 for what failed here."""
    if isinstance(error, RefusalError):
        return error.status
    return 400 if isinstance(error, InputError) else 500


def kind_of(error: StemEdgeError) -> str:
    """Return the type of an error, in OpenAI's words."""
    if isinstance(error, RefusalError):
        return error.kind
    return RefusalError.kind if isinstance(error, InputError) else FailedError.kind


def openai_error(error: StemEdgeError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form, which an event of a stream has, too."""
    param = error.param if isinstance(error, RefusalError) else None
    body = {"message": str(error), "type": kind_of(error), "param": param, "code": None}
    return {"error": body}
