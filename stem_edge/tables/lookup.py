"""Row lookups: for each STEM layer the row of a token, the mean of several, or given values.

The lookup of a token's own id in every layer is its own record. Any other lookup is a *made*
record (composing.py).
"""

from __future__ import annotations

from typing import TypeAlias

# Token ids whose rows are averaged (a token that is there twice counts twice), or a packed row.
Row: TypeAlias = tuple[int, ...] | bytes
RowLookup: TypeAlias = tuple[Row, ...]  # for each STEM layer, in ascending order


def plain(row: Row, layers: int) -> RowLookup:
    """Lookup of the same row in every STEM layer."""
    return (row,) * layers


def token_of(lookup: RowLookup) -> int | None:
    """Return the token whose own record this lookup is; None if it is a made record."""
    first = lookup[0]
    if isinstance(first, tuple) and len(set(first)) == 1 and set(lookup) == {first}:
        return first[0]
    return None


def tokens_of(lookup: RowLookup) -> list[int]:
    """Return the tokens whose records are needed to compose a lookup, ascending."""
    return sorted({token for row in lookup if isinstance(row, tuple) for token in row})
