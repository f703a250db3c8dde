"""Lists of numbers as options of commands have them."""

from __future__ import annotations

from stem_edge.errors import InputError


def parse_numbers(option: str, text: str | None) -> list[int] | None:
    """Parse the comma-separated numbers of an option; None if it is absent. Raises InputError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"{option} {text!r}: not numbers separated by commas, like 2,5")
    return [int(part) for part in parts]
