"""Parts that answers of both kinds have."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import stem_edge
from stem_edge.runtime.scheduling.request import Request

FINGERPRINT = f"b{stem_edge.__version__}"
DONE = b"data: [DONE]\n\n"


def head(name: str, prefix: str, kind: str) -> dict[str, Any]:
    """Return the first fields of an answer, and of every chunk of a stream.

    name: of the model.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": unix_time(),
        "model": name,
        "system_fingerprint": FINGERPRINT,
    }


def usage(requests: Sequence[Request], count: int = 1) -> dict[str, Any]:
    """Return counts of tokens. count: answers to each prompt; a prompt's tokens count once."""
    prompt = sum(request.prompt_tokens for request in requests[::count])
    cached = sum(request.cached_tokens for request in requests[::count])
    new = sum(request.new_tokens for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def unix_time() -> int:
    """Return the date as seconds since 1970. It may jump, so no duration is taken from it."""
    return int(datetime.now(UTC).timestamp())
