"""Format values, texts and sizes for messages, and parse sizes that people write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

from stem_edge.errors import InputError, UnknownOptionError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
MAX_SIZE = 2**63 - 1
MAX_REASON_CHARS = 300


def printable(text: str) -> str:
    """Escape characters that a terminal would interpret, and line breaks."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(value: object) -> str:
    """Format any value for a message, in at most 100 characters."""
    if isinstance(value, int) and value.bit_length() > 256:  # repr cannot: digits are limited
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes | Sequence) and len(value) > 1000:
        return f"a {type(value).__name__} of length {len(value)}"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except Exception:  # repr cannot: such an integer in a list, or nesting too deep
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def one_line(value: object, shown: int = MAX_REASON_CHARS) -> str:
    """Return a value as one line of text, safe for a terminal and cut after `shown` characters."""
    text = str(value)
    line = printable(" ".join(text[: 8 * shown].split()))
    return line if len(line) <= shown and len(text) <= 8 * shown else line[:shown] + "..."


def check_known(options: Iterable[str], known: Sequence[str]) -> None:
    """Raise UnknownOptionError if a name in `options` is not in `known`."""
    if unknown := set(options).difference(known):
        from difflib import get_close_matches  # only for errors

        from stem_edge.foreign import python_replacement

        wrong = min(unknown)
        hint = "".join(f"did you mean {name}? " for name in get_close_matches(wrong, known, 1))
        hint = python_replacement(wrong, known) or hint
        raise UnknownOptionError(
            f"there is no option {wrong}; {hint}expected some of {', '.join(known)}"
        )


def parse_size(size: int | str) -> int:
    """Parse a size in bytes: 600000000, "600MB", "1.5 GiB" or "512k". Raises InputError."""
    found = size if isinstance(size, int) and not isinstance(size, bool) else None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([KMGT]I?)?B?\s*", size.upper())
        found = int(Decimal(match[1]) * UNITS[match[2] or ""]) if match else None
    if found is None or not 0 < found <= MAX_SIZE:
        raise InputError(f"size {size!r} is not understood; write for example 600MB or 2GiB")
    # "600" is refused rather than taken for bytes, because "600MB" was surely meant.
    if isinstance(size, str) and found < 10**6 and not size.strip()[-1].isalpha():
        raise InputError(f"size {size!r} has no unit; write for example {size.strip()}MB")
    return found


def format_size(nbytes: float, *, up: bool = False) -> str:
    """Format a size for people: 3 digits and a decimal unit. up: round up."""
    if up:
        step = 10 ** max(0, len(str(int(nbytes))) - 3)
        nbytes = -(-int(nbytes) // step) * step
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5:  # otherwise 3 digits would round it to 1e+03
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
