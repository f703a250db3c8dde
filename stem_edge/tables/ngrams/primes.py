"""Prime numbers, as tables of n-grams have them for sizes."""

from __future__ import annotations

from collections.abc import Container
from math import isqrt


def is_prime(number: int) -> bool:
    """Return whether a number is prime, by division: tables have at most 2**30 rows."""
    return number > 1 and all(number % factor for factor in range(2, isqrt(number) + 1))


def primes_after(number: int, count: int, used: Container[int] = ()) -> tuple[int, ...]:
    """Return the first `count` primes above a number that are not used elsewhere, ascending."""
    found = list[int]()
    while len(found) < count:
        number += 1
        if is_prime(number) and number not in used:
            found.append(number)
    return tuple(found)
