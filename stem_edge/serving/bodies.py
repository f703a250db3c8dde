"""JSON of requests, of the fields that an interface has, and the date, as answers give it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from stem_edge.serving.refusals import RefusalError

T = TypeVar("T")

# How messages of msgspec name a field.
PLACE = re.compile(r" - at `\$\.?(.*)`$")
MISSING = re.compile(r"missing required field `(.*?)`")


def decoded(body: bytes, kind: type[T]) -> T:
    """Return JSON as a struct. Raises RefusalError that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        place = PLACE.search(str(error)) or MISSING.search(str(error))
        param = place[1] if place is not None else None
        message = PLACE.sub("", str(error))
        raise RefusalError(f"{param}: {message}" if param else message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusalError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RefusalError("the body is nested too deeply") from None


def unix_time() -> int:
    """Return the date as seconds since 1970. It may jump, so no duration is taken from it."""
    return int(datetime.now(UTC).timestamp())
