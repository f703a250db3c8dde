"""Which rows were seen, in few bytes each."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TypeAlias

SlotTable: TypeAlias = "array[int]"
LEAST = 1 << 10  # slots; a power of two, as all sizes are


class Keys:
    """A set of keys of rows: 8 bytes of a hash of each, in a table of at least twice as many slots.

    16 to 32 bytes a key, where a set of Python takes about 100. Two of a million keys are taken for
    one with a probability of 1 to 37 million.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * LEAST))  # 0: free
        self._count = 0

    def __contains__(self, key: bytes) -> bool:
        hashed, slots = _hash(key), self._slots  # another thread may add, which makes a new table
        return slots[_place(slots, hashed)] == hashed

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> bool:
        """Add a key; tell whether it was not there."""
        hashed = _hash(key)
        slots = self._slots
        place = _place(slots, hashed)
        if slots[place] == hashed:
            return False
        slots[place] = hashed
        self._count += 1
        if 2 * self._count > len(self._slots):
            self._grow()
        return True

    def _grow(self) -> None:
        larger = array("Q", bytes(2 * 8 * len(self._slots)))
        for hashed in self._slots:
            if hashed:
                larger[_place(larger, hashed)] = hashed
        self._slots = larger


def _place(slots: SlotTable, hashed: int) -> int:
    """Return the slot that has a hash, or that it would take."""
    last = len(slots) - 1
    place = hashed & last
    while slots[place] not in (0, hashed):
        place = (place + 1) & last
    return place


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") or 1
