"""Bandwidth of memory, which bounds the speed of decoding: a token reads all weights, keys and values."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from stem_edge.apps.measuring.device_profiles import Device
from stem_edge.errors import InputError
from stem_edge.shown import parse_size
from stem_edge.system.memory import available_memory

LEAST = 10**8  # bytes a second; less must be a typing error
READ_NBYTES, MOST_NBYTES = 1 << 29, 1 << 31  # by each thread, and by all: more than caches hold
SAMPLE_NBYTES, SECONDS = 1 << 24, 0.5  # of each thread at a time; of all samples
SHARE = 0.25  # of the available memory, for all threads together


class Bandwidth(NamedTuple):
    """Bytes a second that a processor reads from memory."""

    rate: float
    source: str  # in words


def bandwidth_of(device: Device | None, given: int | str | None, threads: int) -> Bandwidth:
    """Return the given bandwidth, else the device's, else one measured on this machine."""
    if given is not None:
        if parse_size(given) < LEAST:
            raise InputError(
                f"bandwidth is {given} bytes a second, which is too little; write for example 17GB"
            )
        rate, whose = float(parse_size(given)), "as given"
    elif device is not None:
        rate, whose = device.bandwidth, f"stated for {device.name}"
    else:
        rate, whose = measured(threads), f"measured on this machine, {threads} threads"
    return Bandwidth(rate, f"{rate / 1e9:.3g} GB/s, {whose}")


def measured(threads: int) -> float:
    """Return the bytes a second that all threads together read from memory: the best of short samples."""
    left = int(SHARE * available_memory())
    nbytes = min(READ_NBYTES, min(left, MOST_NBYTES) // threads) // 8 * 8
    with ThreadPoolExecutor(threads) as pool:
        arrays = list(pool.map(lambda _: np.ones(nbytes // 8, np.uint64), range(threads)))
        best, until, size = 0.0, time.perf_counter() + SECONDS, SAMPLE_NBYTES // 8
        while time.perf_counter() < until:
            for at in range(0, len(arrays[0]), size):  # short, so that other programs miss some
                parts = [array[at : at + size] for array in arrays]
                started = time.perf_counter()
                list(pool.map(np.bitwise_or.reduce, parts))
                seconds = time.perf_counter() - started
                best = max(best, sum(part.nbytes for part in parts) / seconds)
    return best
