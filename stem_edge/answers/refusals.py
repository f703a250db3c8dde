"""HTTP errors, decoding of request bodies, and error bodies."""

from __future__ import annotations

import logging
import re
from typing import Any, TypeVar

import msgspec

from stem_edge.errors import InputError, StemEdgeError

T = TypeVar("T")
log = logging.getLogger(__name__)
# How messages of msgspec name a field.
PLACE = re.compile(r" - at `\$\.?(.*)`$")
MISSING = re.compile(r"missing required field `(.*?)`")
FLOAT = "got `float`"  # in msgspec's words, where a whole number belongs
MAX_EXACT = 1 << 53  # floats beyond it are all whole, but not the numbers that were written


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


def decoded(body: bytes, kind: type[T]) -> T:
    """Return JSON as a struct, 40.0 as 40 in it. Raises RefusalError that names the field at fault."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if FLOAT not in str(error):
                raise
            return msgspec.convert(_with_integers(msgspec.json.decode(body)), kind)
    except msgspec.ValidationError as error:
        place = PLACE.search(str(error)) or MISSING.search(str(error))
        param = place[1] if place is not None else None
        message = PLACE.sub("", str(error))
        raise RefusalError(f"{param}: {message}" if param else message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusalError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RefusalError("the body is nested too deeply") from None


def _with_integers(value: Any) -> Any:
    """Return JSON whose whole numbers are ints: clients that have floats alone write 40 as 40.0."""
    match value:
        case float() if value.is_integer() and abs(value) <= MAX_EXACT:
            return int(value)
        case list():
            return [_with_integers(each) for each in value]
        case dict():
            return {name: _with_integers(each) for name, each in value.items()}
    return value
