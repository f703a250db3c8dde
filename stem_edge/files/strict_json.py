"""JSON that is read strictly, before a parser sees it: small, shallow, UTF-8, no name twice.

A parser recurses into nesting and takes the last of two fields of the same name, which another one
may not; so both are refused in manifest.json and every zarr.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
MAX_DEPTH = 32
MAX_REASON_CHARS = 300
BOM = b"\xef\xbb\xbf"
# A string, also one that never ends, or a bracket. Possessive, so that nothing is looked at twice.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def decode_json(data: bytes, type: type[T], most: int) -> T:
    """The value in strict JSON of at most so many bytes. Raises ValueError, whose text is one line."""
    try:
        if len(data) > most:
            raise ValueError(f"larger than {most} bytes")
        check_json(data)
        return msgspec.json.decode(data, type=type)
    except (ValueError, ArithmeticError, RecursionError) as error:  # msgspec's are ValueErrors
        raise ValueError(one_line(error)) from error


def check_json(data: bytes) -> None:
    """Raises ValueError unless this is plain JSON; what is in it is the parser's to check."""
    if not data.strip():
        raise ValueError("it is empty")
    if data.startswith(BOM):
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    text = data.decode("utf-8")
    check_depth(data)
    # Numbers are left as text: a long one would take long to become an int.
    json.loads(text, object_pairs_hook=_refuse_repeats, parse_int=str, parse_float=str)


def check_depth(data: bytes) -> None:
    """Raises ValueError if arrays and objects are nested deeper than MAX_DEPTH."""
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
            raise ValueError(f"{name[:80]!r} is there more than once")


def one_line(value: object, shown: int = MAX_REASON_CHARS) -> str:
    """What a file or an error says, fit for a message of one line and for a terminal."""
    text = str(value)
    line = " ".join(text[: 8 * shown].split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= shown and len(text) <= 8 * shown else line[:shown] + "..."
