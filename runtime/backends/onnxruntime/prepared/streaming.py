"""Weights that do not fit into memory beside the others: read anew in each step, and dropped again.

A step reads all weights in the same order. Where they exceed the memory even a little, the system has
always just dropped the pages that come next, and reads nearly all of them again. So a share of the
matrices, spread evenly over the step, is in memory only around its use: a thread drops what was used
and asks for what comes next, while the step computes. All others stay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stem_edge.runtime.backends.onnxruntime.prepared.packed_file import places_in_use
from stem_edge.system.memory import PROC

MADV_PAGEOUT = 21  # Linux 5.4; mmap has no name for it
# Smaller matrices are not worth a system call. Matrices asked for ahead take AHEAD bytes, or three of
# the largest, because the one in use and the next must be there.
LEAST_NBYTES, AHEAD_NBYTES, AHEAD_MATRICES = 1 << 20, 32 << 20, 3
# Kept free for pages of libraries, of the embedding and of the tables.
SPARE_NBYTES = 64 << 20
POLL_SECONDS = 0.001
# The system maps up to 16 pages around one that is touched, also in front of a matrix.
AROUND, ENTRY_NBYTES, PRESENT = 16, 8, 0x80  # PRESENT: in the last byte of an entry of pagemap


class Span(NamedTuple):
    """Mapped pages of one matrix."""

    start: int  # address
    nbytes: int


class WeightStream:
    """Keeps these spans, in the order of use, in memory only around their use. Raises OSError."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans, self._first, self._asked = spans, 0, 0  # the one in use, and asked for so far
        self._ahead = ahead_nbytes(spans)
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._pagemap = os.open(PROC / "self" / "pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._in_step, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name="stem-edge-weights", daemon=True)
        try:
            for span in spans:
                self._call(span, MADV_PAGEOUT)
            self._ask()
        except OSError:
            os.close(self._pagemap)
            raise
        self._thread.start()

    def begin(self) -> None:
        """Follow a step that begins."""
        self._in_step.set()

    def end(self) -> None:
        """Rest until the next step; matrices at its beginning are asked for."""
        self._in_step.clear()

    def close(self) -> None:
        """End the thread; must come before the files are unmapped."""
        self._ended = True
        self._in_step.set()
        self._thread.join()
        os.close(self._pagemap)

    def _follow(self) -> None:
        with suppress(OSError):  # the step needs none of this: it is then only slow
            while self._in_step.wait() and not self._ended:
                if self._touched(self._first + 1):
                    self._call(self._at(self._first), MADV_PAGEOUT)
                    self._first += 1
                    self._ask()
                else:
                    time.sleep(POLL_SECONDS)

    def _ask(self) -> None:
        """Ask for the spans that come next, those of the next step after the last one."""
        while self._asked < self._first + len(self._spans):
            under_way = range(self._first, self._asked + 1)
            if sum(self._at(n).nbytes for n in under_way) > self._ahead:
                break
            self._call(self._at(self._asked), mmap.MADV_WILLNEED)
            self._asked += 1

    def _at(self, number: int) -> Span:
        return self._spans[number % len(self._spans)]

    def _touched(self, number: int) -> bool:
        """Tell whether the step has come to a span, so that it has left the one before."""
        page = self._at(number).start // mmap.PAGESIZE + AROUND
        entries = os.pread(self._pagemap, AROUND * ENTRY_NBYTES, page * ENTRY_NBYTES)
        return any(last & PRESENT for last in entries[ENTRY_NBYTES - 1 :: ENTRY_NBYTES])

    def _call(self, span: Span, advice: int) -> None:
        if self._advise(ctypes.c_void_p(span.start), ctypes.c_size_t(span.nbytes), advice):
            raise OSError(ctypes.get_errno(), "madvise")


def open_stream(graphs: Sequence[Path], room: int) -> WeightStream | None:
    """Stream what of the mapped weights of open graphs exceeds `room` bytes; None if all fits.

    None, too, where the system cannot drop pages on request; it then decides alone what to drop.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError, ValueError):
        spans = [span for graph in graphs for span in _mapped(graph)]
        if chosen := spread(spans, sum(span.nbytes for span in spans) - room + SPARE_NBYTES):
            return WeightStream(chosen)
    return None


def spread(spans: Sequence[Span], excess: int) -> list[Span]:
    """Choose spans of `excess` bytes, and of what is asked for ahead, evenly; none without an excess."""
    large = [span for span in spans if span.nbytes >= LEAST_NBYTES]
    if excess <= 0 or len(large) < AHEAD_MATRICES:
        return []
    # A few far larger ones, as of the head, would only need more room ahead.
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
    """Return the bytes of spans that are in memory at a time."""
    return max(AHEAD_NBYTES, AHEAD_MATRICES * max(span.nbytes for span in spans))


def _mapped(graph: Path) -> Iterator[Span]:
    """Yield the mapped pages that packed matrices fill, in the order of use. Raises OSError, ValueError."""
    maps = list(_maps(graph.with_name(f"{graph.name}.data").resolve()))
    for offset, nbytes in places_in_use(graph):
        for start, stop, mapped_from in maps:
            first = start + offset - mapped_from
            if start <= first and first + nbytes <= stop:
                begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
                whole = (first + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
                yield Span(begin, whole)
                break


def _maps(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield address, end and offset in the file of each mapping of it."""
    for line in (PROC / "self" / "maps").read_text(errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5] == str(file):
            start, stop = (int(address, 16) for address in words[0].split("-"))
            yield start, stop, int(words[2], 16)
