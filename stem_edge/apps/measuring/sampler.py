"""Samples the memory of another process while it works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from stem_edge.system.process_memory import Memory, MemoryReader

T = TypeVar("T")
INTERVAL_SECONDS = 0.02


@dataclass(frozen=True)
class PhaseMemory:
    at_end: Memory
    peak_unevictable: int  # bytes of anonymous memory and swap


def sampled(reader: MemoryReader, work: Callable[[], T]) -> tuple[T, PhaseMemory]:
    """Call `work`; return its result, and the memory of the reader's process meanwhile."""
    done, peak = threading.Event(), reader.unevictable()

    def watch() -> None:
        nonlocal peak
        with suppress(OSError):  # the process has ended; whoever waits for its answer reports that
            while not done.wait(INTERVAL_SECONDS):
                peak = max(peak, reader.unevictable())

    thread = threading.Thread(target=watch, name="stem-edge-sampler")
    thread.start()
    try:
        found = work()
    finally:
        done.set()
        thread.join()
    peak = max(peak, reader.unevictable())
    # Memory by kind is read only here: the system walks every mapping, for tens of milliseconds.
    at_end = reader.memory()
    return found, PhaseMemory(at_end, max(peak, at_end.unevictable))
