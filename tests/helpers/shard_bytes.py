"""Shards edited byte by byte, and a checksum computed bit by bit."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from stem_edge.tables.rows import RecordLayout

# Three records of 20 bytes, two in a shard; the second is all zero.
LAYOUT = RecordLayout(records=3, layers=(1,), parts=((16,),), row_type="int8", group_size=16)
RECORDS = np.array([range(20), [0] * 20, range(100, 120)], np.uint8)


def slow_crc32c(data: bytes) -> bytes:
    """Castagnoli's polynomial bit by bit, to check the library and where sums are placed."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return struct.pack("<I", value ^ 0xFFFFFFFF)


def summed(data: bytes) -> bytes:
    return data + slow_crc32c(data)


def edit(path: Path, where: str, value: object) -> None:
    """Set, or with `...` delete, the value at a path of a JSON file, written with spaces."""
    document: dict[str, Any] = json.loads(path.read_bytes())
    *parents, last = where.split(" ")
    target: Any = document
    for name in parents:
        target = target[int(name) if isinstance(target, list) else name]
    if value is ...:
        del target[last]
    else:
        target[int(last) if isinstance(target, list) else last] = value
    path.write_text(json.dumps(document))
