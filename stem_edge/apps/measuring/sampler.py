"""Samples the memory of another process, phase by phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stem_edge.system.process_memory import Memory, MemoryReader

# Kinds of memory are sampled more rarely than totals, because the system then walks every mapping.
# This takes milliseconds, and would slow the measured process down.
TOTALS_SECONDS, KINDS_SECONDS = 0.02, 0.25
# Share of the time that walks may take: with gigabytes mapped, one needs tens of milliseconds.
MOST_OF_TIME = 0.02


@dataclass(frozen=True)
class Sample:
    """Memory by kind at one moment."""

    seconds: float  # since the sampler began
    phase: str
    memory: Memory


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in one phase, in bytes."""

    at_end: Memory
    peak_unevictable: int  # anonymous memory and swap


class MemorySampler:
    """Samples memory in a thread while a `phase` is open, one phase at a time."""

    def __init__(
        self,
        reader: MemoryReader,
        interval: float = TOTALS_SECONDS,
        kinds_interval: float = KINDS_SECONDS,
    ) -> None:
        self.reader, self.interval, self.kinds_interval = reader, interval, kinds_interval
        self.samples: list[Sample] = []
        self.phases: dict[str, PhaseMemory] = {}
        self._peaks: dict[str, int] = {}  # by phase: of anonymous memory and swap
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Sample while the body runs. Phases of the same name keep the higher peaks."""
        done = threading.Event()
        self._note(name, self.reader.unevictable())
        thread = threading.Thread(target=self._watch, args=(name, done), name="stem-edge-sampler")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        memory = self._sample(name)
        self.phases[name] = PhaseMemory(memory, self._note(name, self.reader.unevictable()))

    def _watch(self, name: str, done: threading.Event) -> None:
        next_kinds = time.perf_counter()
        try:
            while not done.wait(self.interval):
                self._note(name, self.reader.unevictable())
                if (now := time.perf_counter()) >= next_kinds:
                    self._sample(name)
                    took = time.perf_counter() - now
                    next_kinds = now + max(self.kinds_interval, took / MOST_OF_TIME)
        except OSError:  # it has ended; the caller that waits for its answer reports that
            return

    def _sample(self, name: str) -> Memory:
        memory = self.reader.memory()
        self.samples.append(Sample(time.perf_counter() - self._started, name, memory))
        self._note(name, memory.unevictable)
        return memory

    def _note(self, name: str, nbytes: int) -> int:
        """Record a size; return the phase's peak so far."""
        peak = self._peaks[name] = max(nbytes, self._peaks.get(name, 0))
        return peak
