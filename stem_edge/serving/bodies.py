"""Bodies of requests: JSON, of the fields that an interface has."""

from __future__ import annotations

import re
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
