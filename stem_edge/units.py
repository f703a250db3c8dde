"""Sizes as people write them."""

from __future__ import annotations

import re

from stem_edge.errors import InputError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(size: int | str) -> int:
    """Bytes from 600000000, "600MB", "1.5 GiB" or "512k". Raises InputError."""
    if isinstance(size, int):
        found: int | None = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", size.upper())
        found = int(float(match[1]) * UNITS[match[2] or ""]) if match else None
    if found is None or found <= 0:
        raise InputError(f"size {size!r} is not understood; write for example 600MB or 2GiB")
    return found


def format_size(nbytes: float) -> str:
    """A size for people: 3 digits and a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if abs(nbytes) < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
