"""Prime numbers, as tables of n-grams have them for sizes."""

from __future__ import annotations

from collections.abc import Container

# The Miller-Rabin test with these bases is exact for every number of 64 bits (Sorenson and Webster, 2015).
BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Return whether a number below 2**64 is prime."""
    if number < 2:
        return False
    for base in BASES:
        if number % base == 0:
            return number == base
    odd, halvings = number - 1, 0
    while odd % 2 == 0:
        odd, halvings = odd // 2, halvings + 1
    return all(_passes(number, base, odd, halvings) for base in BASES)


def _passes(number: int, base: int, odd: int, halvings: int) -> bool:
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(halvings - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def primes_after(number: int, count: int, used: Container[int] = ()) -> tuple[int, ...]:
    """Return the first `count` primes above a number that are not used elsewhere, ascending."""
    found = list[int]()
    while len(found) < count:
        number += 1
        if is_prime(number) and number not in used:
            found.append(number)
    return tuple(found)
