"""The date, as answers give it."""

from __future__ import annotations

from datetime import UTC, datetime


def unix_time() -> int:
    """Return the date as seconds since 1970. It may jump, so no duration is taken from it."""
    return int(datetime.now(UTC).timestamp())
