"""Streams weights that are larger than memory: each step reads some matrices and then drops them.

Every step reads all weights in the same order. If they are only slightly larger than the memory, the system
reads nearly all of them in each step: the next page is always the one that it has just dropped. So only some
matrices, spread evenly over the step, are streamed: a thread drops each of them after its use and reads the
next one ahead, while the step computes. All other matrices stay in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from stem_edge.runtime.backends.onnxruntime.prepared.mapped_pages import (
    ENTRY_NBYTES,
    PAGEMAP,
    is_written,
    mappings,
    packed_places,
)
from stem_edge.system.memory import available_memory

# Smaller matrices are not worth a system call. Matrices are read ahead up to AHEAD_NBYTES, or three of the largest
# matrices, because the matrix in use and the next one must be in memory.
LEAST_NBYTES, AHEAD_NBYTES, AHEAD_MATRICES = 1 << 20, 32 << 20, 3
# Memory left free for pages of libraries, of the embedding and of tables, and for a prompt's arrays. With 24 MB,
# the system dropped and reread all weights of a model of Gemma 4 E2B's shape in 1 GiB.
SPARE_NBYTES = 64 << 20
# Time between checks of free memory, and the change of free memory after which matrices are chosen anew.
LOOK_SECONDS, CHANGE_NBYTES = 1.0, 32 << 20
POLL_SECONDS = 0.001
# The system maps up to 16 pages around one that is touched, also in front of a matrix.
AROUND, PRESENT = 16, 0x80  # PRESENT: in the last byte of an entry of PAGEMAP


class Span(NamedTuple):
    """Mapped pages of one matrix, and their offset in the file."""

    start: int  # address
    nbytes: int
    file: int  # descriptor
    offset: int


class WeightStream:
    """Thread that holds some matrices in memory only while they are used; free memory decides how many.

    spans: all matrices that a step reads, in the order of use. files: their files' descriptors, which `close` closes.
    Raises OSError if the system does not report which pages a process has touched.
    """

    def __init__(self, spans: Sequence[Span], files: ExitStack) -> None:
        self._all, self.chosen, self._stays, self._files = spans, list[Span](), spans, files
        self._excess, self._next_look = 0, 0.0
        # Numbers of the matrix in use and of the next one to ask for; bytes to read ahead.
        self._first, self._asked, self._ahead = 0, 0, 0
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._pagemap = _opened(PAGEMAP, files)
        self._choose()
        self._in_step, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="stem-edge-weights", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager: this object's thread reads and drops weights only during the block."""
        try:
            self._in_step.set()
            yield
        finally:
            self._in_step.clear()

    def close_with(self, owner: object) -> None:
        """Close the stream when `owner`, which keeps the weight files mapped, is garbage-collected."""
        weakref.finalize(owner, self.close).atexit = False

    def close(self) -> None:
        """End the thread. Must be called before the weight files are unmapped."""
        self._closing.set()
        self._in_step.set()
        self._thread.join()
        self._files.close()

    def _follow(self) -> None:
        with suppress(OSError):  # a step does not need this thread; it is only slow without
            while self._in_step.wait() and not self._closing.is_set():
                self._choose()
                if self.chosen and self._touched(self._first + 1):
                    self._give_back(self._at(self._first))
                    self._uncache(self._at(self._first))
                    self._first += 1
                    self._ask()
                else:
                    self._closing.wait(POLL_SECONDS if self.chosen else LOOK_SECONDS)

    def _choose(self) -> None:
        """If free memory has changed, choose again which matrices are dropped after each use."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        needed = sum(span.nbytes for span in self._all) + SPARE_NBYTES
        excess = max(0, needed - available_memory())
        if abs(excess - self._excess) >= CHANGE_NBYTES:
            self._excess, self.chosen = excess, spread(self._all, excess)
            self._stays = [span for span in self._all if span not in set(self.chosen)]
            self._first, self._asked, self._ahead = 0, 0, ahead_nbytes(self.chosen)
            self._drop_chosen()
        if self.chosen:
            self._settle()

    def _drop_chosen(self) -> None:
        """Drop all pages of the chosen matrices from this process and from the page cache."""
        for span in self.chosen:
            self._give_back(span)
        for file in {span.file for span in self.chosen}:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _settle(self) -> None:
        """Drop pages of streamed matrices that are not in use, and read missing pages of all other matrices.

        The system also reads neighbours of the pages in use. They would push out matrices that should stay.
        """
        under_way = {self._at(n) for n in range(self._first, self._asked)}
        for span in self.chosen:
            if span not in under_way:
                self._uncache(span)
        for span in self._stays:
            self._advise(span, mmap.MADV_WILLNEED)
        self._ask()

    def _ask(self) -> None:
        """Ask the system to read the next streamed matrices; after the last matrix, the next step's first."""
        while self._asked < self._first + len(self.chosen):
            under_way = range(self._first, self._asked + 1)
            if sum(self._at(n).nbytes for n in under_way) > self._ahead:
                break
            self._advise(self._at(self._asked), mmap.MADV_WILLNEED)
            self._asked += 1

    def _at(self, number: int) -> Span:
        return self.chosen[number % len(self.chosen)]

    def _touched(self, number: int) -> bool:
        """Return True if the step has begun to use streamed matrix `number`, and needs no earlier matrix."""
        page = self._at(number).start // mmap.PAGESIZE + AROUND
        entries = os.pread(self._pagemap, AROUND * ENTRY_NBYTES, page * ENTRY_NBYTES)
        return any(last & PRESENT for last in entries[ENTRY_NBYTES - 1 :: ENTRY_NBYTES])

    def _give_back(self, span: Span) -> None:
        """Drop the pages of a matrix from this process, unless they were written to."""
        if not is_written(self._pagemap, span.start, span.start + span.nbytes):
            self._advise(span, mmap.MADV_DONTNEED)

    def _uncache(self, span: Span) -> None:
        """Drop a matrix's pages from the system's page cache, except pages that some process has mapped."""
        os.posix_fadvise(span.file, span.offset, span.nbytes, os.POSIX_FADV_DONTNEED)

    def _advise(self, span: Span, advice: int) -> None:
        if self._madvise(ctypes.c_void_p(span.start), ctypes.c_size_t(span.nbytes), advice):
            raise OSError(ctypes.get_errno(), "madvise")


def open_stream(graphs: Sequence[Path]) -> WeightStream | None:
    """Start a stream over the mapped weights of open graphs; None if all weights fit into memory.

    Also None if the system does not report touched pages, or cannot start a thread.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError, RuntimeError), ExitStack() as failed:
        files = ExitStack()
        failed.callback(files.close)
        if spans := [span for graph in graphs for span in _mapped(graph, files)]:
            stream = WeightStream(spans, files)
            failed.pop_all()
            if stream.chosen:
                return stream
            stream.close()
    return None


def spread(spans: Sequence[Span], excess: int) -> list[Span]:
    """Return the matrices to stream, evenly spread, so that `excess` bytes fewer are in memory."""
    large = [span for span in spans if span.nbytes >= LEAST_NBYTES]
    if excess <= 0 or len(large) < AHEAD_MATRICES:
        return []
    # A few far larger matrices, such as the head, would only need more room to be read ahead.
    usual = [span for span in large if AHEAD_MATRICES * span.nbytes <= AHEAD_NBYTES]
    if sum(span.nbytes for span in usual) > excess + AHEAD_NBYTES:
        large = usual
    share = (excess + ahead_nbytes(large)) / sum(span.nbytes for span in large)
    chosen, owed = list[Span](), 0.0
    for span in large:
        owed += span.nbytes * share
        if owed >= span.nbytes:
            chosen.append(span)
            owed -= span.nbytes
    return chosen


def ahead_nbytes(spans: Sequence[Span]) -> int:
    """Return how many bytes of the streamed matrices `spans` are in memory at a time."""
    return max(AHEAD_NBYTES, AHEAD_MATRICES * max((span.nbytes for span in spans), default=0))


def _mapped(graph: Path, files: ExitStack) -> Iterator[Span]:
    """Yield the mapped pages that lie within packed matrices, in the order of use. Raises OSError."""
    weights = graph.with_name(f"{graph.name}.data").resolve()
    if not weights.exists():  # none of its matrices was packed
        return
    parts = [one for one in mappings() if one.file == str(weights)]
    file = _opened(weights, files)
    for offset, nbytes in packed_places(graph):
        for part in parts:
            first = part.start + offset - part.offset
            if part.start <= first and first + nbytes <= part.stop:
                skipped = -first % mmap.PAGESIZE
                whole = (nbytes - skipped) // mmap.PAGESIZE * mmap.PAGESIZE
                yield Span(first + skipped, whole, file, offset + skipped)
                break


def _opened(path: Path, files: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    files.callback(os.close, descriptor)
    return descriptor
