"""Samples the memory of another process, phase by phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stem_edge.system.process_memory import Memory, MemoryReader

INTERVAL_SECONDS = 0.02


@dataclass(frozen=True)
class PhaseMemory:
    at_end: Memory
    peak_unevictable: int  # bytes of anonymous memory and swap


class MemorySampler:
    """Samples a process's memory in a thread while a `phase` is open; one phase at a time."""

    def __init__(self, reader: MemoryReader, interval: float = INTERVAL_SECONDS) -> None:
        self.reader, self.interval = reader, interval
        self.phases: dict[str, PhaseMemory] = {}
        self._peaks: dict[str, int] = {}  # by phase: of anonymous memory and swap

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: sample in the `with` block. A repeated name keeps the higher peak."""
        done = threading.Event()
        self._note(name)
        thread = threading.Thread(target=self._watch, args=(name, done), name="stem-edge-sampler")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self._note(name)
        # Memory by kind is read only here: the system walks every mapping, for tens of milliseconds.
        at_end = self.reader.memory()
        self.phases[name] = PhaseMemory(at_end, max(at_end.unevictable, self._peaks[name]))

    def _watch(self, name: str, done: threading.Event) -> None:
        with suppress(OSError):  # the process has ended; whoever waits for its answer reports that
            while not done.wait(self.interval):
                self._note(name)

    def _note(self, name: str) -> None:
        self._peaks[name] = max(self.reader.unevictable(), self._peaks.get(name, 0))
