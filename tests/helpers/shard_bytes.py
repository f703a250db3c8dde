"""Records of a small shard, and the checksum of its index computed bit by bit."""

from __future__ import annotations

import struct

import numpy as np

from stem_edge.tables.rows import RecordLayout

# Three records of 20 bytes, two in a shard; the second is all zero.
LAYOUT = RecordLayout(records=3, layers=(1,), parts=((16,),), row_type="int8", group_size=16)
RECORDS = np.array([range(20), [0] * 20, range(100, 120)], np.uint8)


def slow_crc32c(data: bytes) -> bytes:
    """Compute CRC-32C bit by bit, independently of the library that is tested."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return struct.pack("<I", value ^ 0xFFFFFFFF)


def summed(data: bytes) -> bytes:
    """Append the checksum."""
    return data + slow_crc32c(data)
