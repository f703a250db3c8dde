"""The sampling thread: phases, their peaks, and processes that end."""

from __future__ import annotations

import threading
import time

import pytest
from programs import LINUX, SIZE, Program

from stem_edge.apps.measuring.sampler import MemorySampler
from stem_edge.system.process_memory import Memory, MemoryReader

DEADLINE_SECONDS = 10.0


class FakeReader(MemoryReader):
    """A process whose memory is set by the test."""

    def __init__(self) -> None:
        self.anonymous, self.files = 10, 5
        self.reads, self.ended = 0, False

    def memory(self) -> Memory:
        self._check()
        return Memory(self.anonymous, swap=1, tables=self.files)

    def unevictable(self) -> int:
        self._check()
        return self.anonymous + 1

    def _check(self) -> None:
        if self.ended:
            raise ProcessLookupError("ended")
        self.reads += 1

    def wait_for_reads(self, more: int) -> None:
        target, deadline = self.reads + more, time.monotonic() + DEADLINE_SECONDS
        while self.reads < target:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def watched(pid: int) -> MemorySampler:
    return MemorySampler(MemoryReader(pid))


def no_thread() -> bool:
    return all(thread.name != "stem-edge-sampler" for thread in threading.enumerate())


@LINUX
def test_a_short_spike_is_seen(program: Program) -> None:
    sampler = watched(program.pid)
    with sampler.phase("spike"):
        program.do(f"b = b'x' * {2 * SIZE}; time.sleep(0.5); del b")
    spike = sampler.phases["spike"]
    assert spike.peak_unevictable - spike.at_end.unevictable == pytest.approx(2 * SIZE, rel=0.02)

    with sampler.phase("after"):
        program.do("pass")
    after = sampler.phases["after"]
    assert after.peak_unevictable == pytest.approx(after.at_end.unevictable, rel=0.02)


def test_the_thread_ends_when_the_process_does() -> None:
    reader = FakeReader()
    sampler = MemorySampler(reader, 0.001)
    with pytest.raises(ProcessLookupError), sampler.phase("end"):
        reader.wait_for_reads(3)
        reader.ended = True
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not no_thread():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_phases_keep_their_own_peaks() -> None:
    reader = FakeReader()
    sampler = MemorySampler(reader, 0.001)
    with sampler.phase("load"):
        reader.anonymous = 100
        reader.wait_for_reads(10)
        reader.anonymous = 20
    with sampler.phase("run"):
        reader.files = 7
    load, run = sampler.phases["load"], sampler.phases["run"]
    assert load.peak_unevictable == 101
    assert load.at_end == Memory(20, swap=1, tables=5)
    assert run.peak_unevictable == 21

    with sampler.phase("load"):  # again: the higher peaks, the later end
        reader.anonymous = 30
    again = sampler.phases["load"]
    assert again.peak_unevictable == 101
    assert again.at_end.anonymous == 30
    assert list(sampler.phases) == ["load", "run"]
