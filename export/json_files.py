"""JSON files of a checkpoint: read whole, strictly, and with a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stem_edge import disk
from stem_edge.errors import CheckpointError
from stem_edge.export.settings import one_line
from stem_edge.strict_json import check_json

MAX_NBYTES = 1 << 24  # indexes of great models have some megabytes
MAX_VALUES = 1 << 22  # each takes some hundred bytes when it is decoded
T = TypeVar("T")


def read_json(path: Path, what: str, type: type[T], nbytes: int = MAX_NBYTES) -> T:
    """A file decoded as `type`; `what` it should be. Raises CheckpointError, FileNotFoundError."""
    try:
        data = disk.read_file(path.resolve(), nbytes)
        if len(data) > nbytes:
            raise ValueError(f"larger than {nbytes} bytes")
        check_values(data)
        check_json(data)
        return msgspec.json.decode(data, type=type)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not {what} ({reason_of(error)}); copy the file again from where the model was "
            "made"
        ) from error


def check_values(data: bytes) -> None:
    """Raises ValueError for JSON of so many values that decoding it would fill the memory."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")


def reason_of(error: Exception) -> str:
    """What a library says, fit for a message."""
    said: Any = getattr(error, "strerror", None) or str(error) or error.__class__.__name__
    return one_line(said, 160).rstrip(".")
