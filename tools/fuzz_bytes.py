"""Bytes that are changed without knowing what they mean, and numbers at their borders."""

from __future__ import annotations

import struct
from random import Random

MAX_NBYTES = 1 << 16
BORDERS = [0, 1, 2, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536]
BORDERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
WIDTHS = "BHIQ"


def border(rng: Random, near: int = 0) -> int:
    """A number at which something may break, or one beside `near`."""
    if rng.randrange(3) == 0:
        return max(0, near + rng.choice([-32, -8, -1, 1, 8, 32]))
    return max(0, rng.choice(BORDERS) + rng.choice([-1, 0, 0, 0, 1]))


def packed(number: int, code: str) -> bytes:
    """An unsigned number, little-endian; one that is too large is cut."""
    nbytes = struct.calcsize("<" + code)
    return (number % (1 << 8 * nbytes)).to_bytes(nbytes, "little")


def mutate_bytes(data: bytes, other: bytes, rng: Random) -> bytes:
    """One to four changes: bits, bytes, pieces that go, come twice, move or are those of another."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 2, 4])):
        _change(changed, other, rng)
    return bytes(changed[:MAX_NBYTES])


def _change(data: bytearray, other: bytes, rng: Random) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice([1, 2, 4, 8, 16, 64, 1024]))
    kind = rng.randrange(8)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    elif kind == 2:
        del data[at:end]
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 64]))
    elif kind == 4:
        data[at:at] = data[at:end] * rng.choice([1, 1, 2, 16])
    elif kind == 5:
        code = rng.choice(WIDTHS)
        number = packed(border(rng), code)
        data[at : at + len(number)] = number if rng.randrange(2) else number[::-1]
    elif kind == 6:
        start = rng.randrange(len(other) + 1)
        data[at:end] = other[start : start + rng.choice([1, 8, 64, 1024])]
    else:
        del data[at:]
        if rng.randrange(2):
            data += other[at:]
