"""The table store of the fixture `root`, which tests damage, and the bytes of its shards."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from shard_bytes import summed

from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat

# Five records of 20 bytes, two per shard, so that the last shard has an empty place.
LAYOUT = RecordLayout(records=5, layers=(1,), parts=((16,),), row_type="int8", group_size=16)
FORMAT = TableFormat(tokens=5, stored=LAYOUT)
RECORDS = np.arange(100, dtype=np.uint8).reshape(5, 20)
STRIDE, INDEX_NBYTES = 24, 2 * 16 + 4
NOWHERE = 2**64 - 1


def shard(root: Path, number: int) -> Path:
    """Path of a shard."""
    return root / "records" / "c" / str(number) / "0"


def index_of(*pairs: tuple[int, int]) -> bytes:
    """Encode an index of (offset, size) pairs with a valid checksum."""
    return summed(b"".join(struct.pack("<QQ", *pair) for pair in pairs))
