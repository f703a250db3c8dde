"""Values and texts from elsewhere, as messages show them."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Escape what a terminal would act on, and what would break a line."""
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
