"""A failing disk: faults injected into stem_edge.files.disk, through which all files are accessed.

Each function patches that module until the test's monkeypatch is undone. Calls are counted from 0, over
all threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from stem_edge.files import disk

# Calls that change the contents of a disk, or make them durable.
CHANGES = (
    *["create", "append", "write", "fsync", "make_folder", "rename"],
    *["remove", "remove_folder", "sync_folder"],
)
READS = ("open_file", "pread")
Hook = Callable[[str], object]


class Counter:
    """Names of the calls so far, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, name: str) -> int:
        """Count a call and return its number."""
        with self._lock:
            self.names.append(name)
            return len(self.names) - 1

    def __len__(self) -> int:
        return len(self.names)


class Failing:
    """A hook that fails the k-th call, or all from the k-th on."""

    def __init__(self, first: int, number: int, *, for_ever: bool = False) -> None:
        self.first, self.number, self.for_ever = first, number, for_ever
        self.count = Counter()

    @property
    def failed(self) -> bool:
        """Return whether a call has failed."""
        return len(self.count) > self.first

    def __call__(self, name: str) -> None:
        """Count a call; raise OSError if it is to fail."""
        at = self.count(name)
        if at == self.first or (self.for_ever and at > self.first):
            raise OSError(self.number, os.strerror(self.number))


def watch(patch: pytest.MonkeyPatch, names: Iterable[str], before: Hook) -> None:
    """Run `before(name)` before each of these calls; the call raises what it raises."""
    for name in names:
        patch.setattr(disk, name, _watched(name, getattr(disk, name), before))


def _watched(name: str, call: Callable[..., Any], before: Hook) -> Callable[..., Any]:
    def watched(*arguments: Any) -> Any:
        before(name)
        return call(*arguments)

    return watched


def slow(patch: pytest.MonkeyPatch, names: Iterable[str], seconds: float) -> None:
    """Delay each of these calls."""
    watch(patch, names, lambda _: time.sleep(seconds))


def shorten(patch: pytest.MonkeyPatch, most: int) -> None:
    """Make reads and writes stop after so many bytes."""
    pread, write = disk.pread, disk.write
    patch.setattr(disk, "pread", lambda file, buffer, at: pread(file, buffer[:most], at))
    patch.setattr(disk, "write", lambda file, data: write(file, data[:most]))


def flip_bits(patch: pytest.MonkeyPatch, *, once: bool) -> set[int]:
    """Flip a bit in the first byte of reads; once: of each place alone. Return these places."""
    pread, seen = disk.pread, set[int]()

    def disturbed(descriptor: int, buffer: memoryview, offset: int) -> int:
        done = pread(descriptor, buffer, offset)
        if done and not (once and offset in seen):
            seen.add(offset)
            buffer[0] ^= 1
        return done

    patch.setattr(disk, "pread", disturbed)
    return seen
