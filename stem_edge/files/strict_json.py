"""Strict JSON: checked to be small, shallow, UTF-8 and without repeated names, and then parsed.

Parsers recurse into nesting, and take different ones of two fields with one name. So both are
refused in manifest.json and every zarr.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec

from stem_edge.shown import printable

T = TypeVar("T")
MAX_DEPTH = 32
MAX_REASON_CHARS = 300
BOM = b"\xef\xbb\xbf"
# A string, even an unterminated one, or a bracket. Possessive, to avoid backtracking.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def decode_json(data: bytes, type: type[T], most: int) -> T:
    """Decode strict JSON of at most `most` bytes. Raises ValueError with a text of one line."""
    try:
        if len(data) > most:
            raise ValueError(f"larger than {most} bytes")
        check_json(data)
        return msgspec.json.decode(data, type=type)
    except (ValueError, ArithmeticError, RecursionError) as error:  # as msgspec does
        raise ValueError(one_line(error)) from error


def check_json(data: bytes) -> None:
    """Raise ValueError unless this is strict JSON; the types in it are left to the parser."""
    if not data.strip():
        raise ValueError("it is empty")
    if data.startswith(BOM):
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    text = data.decode("utf-8")
    check_depth(data)
    # Numbers stay text, because Python takes quadratic time to convert long ones.
    json.loads(text, object_pairs_hook=_refuse_repeats, parse_int=str, parse_float=str)


def check_depth(data: bytes) -> None:
    """Raise ValueError if arrays and objects are nested deeper than MAX_DEPTH."""
    depth = 0
    for token in _TOKEN.finditer(data):
        opening = data[token.start()]
        if opening in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(
                    f"nested deeper than {MAX_DEPTH} arrays and objects at byte {token.start()}"
                )
        elif opening in b"]}":
            depth -= 1


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1:
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{name[:80]!r} appears more than once")


def one_line(value: object, shown: int = MAX_REASON_CHARS) -> str:
    """Make the text of a file or an error fit for a message of one line and for a terminal."""
    text = str(value)
    line = printable(" ".join(text[: 8 * shown].split()))
    return line if len(line) <= shown and len(text) <= 8 * shown else line[:shown] + "..."
