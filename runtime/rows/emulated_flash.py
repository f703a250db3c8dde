"""Emulates slower flash devices by delaying file reads, for benchmarks.

Caches, background writes, throttling and read-ahead are not emulated: label results as emulated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.files import ByteRange, ShardFiles
from stem_edge.runtime.rows.rows import FlashName
from stem_edge.tables.shards import ShardGrid


class FlashProfile(NamedTuple):
    """Speed of random reads: bytes/s, seconds per read, most reads at a time and per second."""

    bandwidth: float
    latency: float
    depth: int
    rate: float = float("inf")  # at any depth


# Round numbers between what vendors state and what users measure for random reads; SD of class A1.
PROFILES: dict[FlashName, FlashProfile] = {
    "nvme": FlashProfile(3.0e9, 80e-6, 32, 300_000),
    "ufs4": FlashProfile(1.8e9, 100e-6, 32, 100_000),
    "ufs2": FlashProfile(600e6, 150e-6, 16, 40_000),
    "emmc": FlashProfile(200e6, 250e-6, 4, 8_000),
    "sdcard": FlashProfile(60e6, 700e-6, 1, 1_500),
}


class SlowFiles(ShardFiles):
    """Table shard files with the delays of an emulated device: one batch of reads at a time."""

    def __init__(self, grids: Sequence[ShardGrid], flash: FlashName) -> None:
        super().__init__(grids)
        if flash not in PROFILES:
            raise InputError(f"emulate_flash is {flash!r}; expected one of {', '.join(PROFILES)}")
        self._profile, self._lock, self._free_at = PROFILES[flash], threading.Lock(), 0.0

    def read(self, pieces: Sequence[ByteRange], buffers: Sequence[U8]) -> list[int | OSError]:
        started, found = time.perf_counter(), super().read(pieces, buffers)
        bandwidth, latency, depth, rate = self._profile
        requests = max(latency * -(-len(pieces) // depth), len(pieces) / rate)
        with self._lock:
            begin = max(started, self._free_at)
            self._free_at = until = begin + requests + sum(p.nbytes for p in pieces) / bandwidth
        time.sleep(max(0.0, until - time.perf_counter()))
        return found
