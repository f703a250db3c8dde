"""The sampling thread: peaks of memory, and processes that end."""

from __future__ import annotations

import threading

import pytest
from programs import LINUX, SIZE, Program
from servers import wait_for

from stem_edge.apps.measuring.sampler import sampled
from stem_edge.system.process_memory import Memory, MemoryReader


class FakeReader(MemoryReader):
    """A process whose memory is set by the test."""

    def __init__(self) -> None:
        self.anonymous, self.files = 10, 5
        self.reads, self.ended = 0, False

    def memory(self) -> Memory:
        self._check()
        return Memory(self.anonymous, swap=1, backbone=self.files)

    def unevictable(self) -> int:
        self._check()
        return self.anonymous + 1

    def _check(self) -> None:
        if self.ended:
            raise ProcessLookupError("ended")
        self.reads += 1

    def wait_for_reads(self, more: int) -> None:
        target = self.reads + more
        wait_for(lambda: self.reads >= target)


def no_thread() -> bool:
    return all(thread.name != "stem-edge-sampler" for thread in threading.enumerate())


@LINUX
def test_a_short_spike_is_seen(program: Program) -> None:
    reader = MemoryReader(program.pid)
    _, spike = sampled(reader, lambda: program.do(f"b = b'x' * {2 * SIZE}; time.sleep(0.5); del b"))
    assert spike.peak_unevictable - spike.at_end.unevictable == pytest.approx(2 * SIZE, rel=0.02)
    _, after = sampled(reader, lambda: program.do("pass"))
    assert after.peak_unevictable == pytest.approx(after.at_end.unevictable, rel=0.02)


def test_the_thread_ends_when_the_process_does() -> None:
    reader = FakeReader()

    def end() -> None:
        reader.wait_for_reads(3)
        reader.ended = True
        wait_for(no_thread)

    with pytest.raises(ProcessLookupError):
        sampled(reader, end)


def test_peaks_are_those_of_the_work() -> None:
    reader = FakeReader()

    def load() -> str:
        reader.anonymous = 100
        reader.wait_for_reads(10)
        reader.anonymous = 20
        return "loaded"

    found, memory = sampled(reader, load)
    assert (found, memory.peak_unevictable) == ("loaded", 101)
    assert memory.at_end == Memory(20, swap=1, backbone=5)
    _, later = sampled(reader, lambda: None)
    assert later.peak_unevictable == 21
