"""Lists of tokens in a tokenizer.json, read in pieces.

Objects of Python for a whole list would take more memory than the library does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MAX_TOKENS = 1 << 19  # twice the largest vocabulary among published models
TEXT, SPACE = rb'"[^"\\]*(?:\\.[^"\\]*)*"', rb"[ \t\r\n]*"
PAIR = rb"\[" + SPACE + TEXT + SPACE + b"," + SPACE + rb"%b" + SPACE + rb"\]"
_PIECE_COUNT = 256


def some_of(element: bytes) -> re.Pattern[bytes]:
    """Return a pattern of up to _PIECE_COUNT elements of a list."""
    return re.compile(b"(?:%b%b%b,?){1,%d}" % (SPACE, element, SPACE, _PIECE_COUNT), re.DOTALL)


def check_count(count: int) -> None:
    if count > MAX_TOKENS:
        raise ValueError(
            f"model.vocab has more than {MAX_TOKENS:,} entries, expected at most as many"
        )


def check_distinct(ids: Mapping[str, int], count: int) -> None:
    if len(ids) != count:
        raise ValueError(f"model.vocab has {count} entries for {len(ids)} tokens, expected as many")
    if not ids:
        raise ValueError("model.vocab is empty, expected tokens")


def lists(raw: msgspec.Raw, some: re.Pattern[bytes], kind: Any, where: str) -> Iterator[list[Any]]:
    """Yield the elements of a JSON list in pieces. Raises ValueError for one of another kind."""
    data = memoryview(raw)
    if bytes(data[:1]) != b"[":
        raise ValueError(f"{where} is not a list")
    at, end = 1, len(data) - 1
    while at < end:
        found = some.match(data, at, end)
        if found is None:
            if not bytes(data[at:end]).strip():
                return
            raise ValueError(f"{where} has {bytes(data[at : at + 80])!r}, expected pairs of tokens")
        yield msgspec.json.decode(b"[" + found[0].rstrip(b", \t\r\n") + b"]", type=kind)
        at = found.end()
