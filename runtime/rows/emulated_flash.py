"""Emulated flash: reads from a fast disk delayed as if by a slower device.

Only delays are emulated, from four stated numbers; real devices also have caches, background writes
and heat, and begin reads that are asked for ahead. Figures measured with it must be labelled "emulated".
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from stem_edge.errors import InputError
from stem_edge.runtime.rows.shards import FlashName


class FlashProfile(NamedTuple):
    """Speed of a device in random reads of tens of KiB."""

    bandwidth: float  # bytes per second
    latency: float  # seconds for one read
    depth: int  # reads in flight at once
    rate: float = float("inf")  # most reads per second, at any depth


# Round numbers between what vendors state and what users measure for random reads; SD of class A1.
PROFILES: dict[FlashName, FlashProfile] = {
    "nvme": FlashProfile(3.0e9, 80e-6, 32, 300_000),
    "ufs4": FlashProfile(1.8e9, 100e-6, 32, 100_000),
    "ufs2": FlashProfile(600e6, 150e-6, 16, 40_000),
    "emmc": FlashProfile(200e6, 250e-6, 4, 8_000),
    "sdcard": FlashProfile(60e6, 700e-6, 1, 1_500),
}


class EmulatedFlash:
    """A device that serves one batch of reads after the other; threads may wait for it together."""

    def __init__(self, profile: FlashProfile) -> None:
        self._profile, self._lock, self._free_at = profile, threading.Lock(), 0.0

    def wait(self, started: float, reads: int, nbytes: int) -> None:
        """Sleep until a batch requested at `started` (perf_counter) would have arrived."""
        bandwidth, latency, depth, rate = self._profile
        requests = max(latency * -(-reads // depth), reads / rate)
        with self._lock:
            begin = max(started, self._free_at)
            self._free_at = begin + requests + nbytes / bandwidth
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


def open_flash(name: FlashName | None) -> EmulatedFlash | None:
    """Make the device of a profile. Raises InputError."""
    if name is None:
        return None
    if name not in PROFILES:
        raise InputError(f"emulate_flash is {name!r}; expected one of {', '.join(PROFILES)}")
    return EmulatedFlash(PROFILES[name])
