"""Weights that exceed the memory: which are read anew, when they are dropped, and the same tokens."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stem_edge
from stem_edge.runtime.backends.onnxruntime.prepared import looking, streaming
from stem_edge.runtime.backends.onnxruntime.prepared.streaming import (
    AHEAD_NBYTES,
    MADV_PAGEOUT,
    Span,
    WeightStream,
    spread,
)

MB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped on Linux only")
Calls = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("sizes", "excess", "chosen"),
    [
        ([5] * 40, 0, []),
        ([5] * 40, -100, []),
        ([5] * 2, 9, []),  # the one in use and the next would be all
        ([5] * 40, 68, list(range(1, 40, 2))),  # with 32 asked for ahead, half of them, spread
        ([5] * 40, 300, list(range(40))),
        ([0.5, 5] * 40, 68, list(range(3, 80, 4))),  # small ones stay
        ([100, *[5] * 40, 100], 68, list(range(2, 41, 2))),  # the few that are far larger stay
        ([20] * 40, 140, list(range(3, 40, 4))),  # with 60 ahead
    ],
)
def test_spread(sizes: list[float], excess: int, chosen: list[int]) -> None:
    spans = [Span(n, int(size * MB)) for n, size in enumerate(sizes)]
    assert [span.start for span in spread(spans, excess * MB)] == chosen


class Step:
    """Touches mapped matrices in order, as a step does."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        path.write_bytes(b"x" * sum(sizes))
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = np.frombuffer(self._map, np.uint8)
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self._slices = [slice(a, a + size) for a, size in zip(starts, sizes, strict=True)]
        address = self._bytes.ctypes.data
        self.spans = [Span(address + a, size) for a, size in zip(starts, sizes, strict=True)]

    def touch(self, number: int) -> None:
        assert self._bytes[self._slices[number]][:: mmap.PAGESIZE].all()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is asked of the system: address and advice. Pages leave the process, if not the memory."""
    found: Calls = []
    asked = WeightStream._call

    def call(stream: WeightStream, span: Span, advice: int) -> None:
        found.append((span.start, advice))
        asked(stream, span, mmap.MADV_DONTNEED if advice == MADV_PAGEOUT else advice)

    monkeypatch.setattr(WeightStream, "_call", call)
    return found


def soon(ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.002)
    return ready()


@linux_only
def test_a_matrix_is_dropped_once_the_next_is_touched(tmp_path: Path, calls: Calls) -> None:
    step = Step(tmp_path / "weights", [8 * MB] * 6)
    starts = [span.start for span in step.spans]
    stream = WeightStream(step.spans)
    ahead = AHEAD_NBYTES // (8 * MB)
    assert calls[:6] == [(start, MADV_PAGEOUT) for start in starts]
    assert calls[6:] == [(start, mmap.MADV_WILLNEED) for start in starts[:ahead]]
    calls.clear()
    stream.begin()
    expected: Calls = []
    for number in [0, 1, 2, 3, 4, 5, 0, 1]:  # the next step begins anew
        step.touch(number)
        if expected or number:
            before = (number - 1) % 6
            expected += [(starts[before], MADV_PAGEOUT)]
            expected += [(starts[(before + ahead) % 6], mmap.MADV_WILLNEED)]
        assert soon(lambda: calls == expected), number
    stream.close()
    assert calls == expected


@linux_only
def test_steps_that_ended_early_do_not_confuse_it(tmp_path: Path, calls: Calls) -> None:
    step = Step(tmp_path / "weights", [8 * MB] * 6)
    stream = WeightStream(step.spans)
    stream.begin()
    for number in [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]:
        step.touch(number)
        time.sleep(0.01)
    stream.end()
    dropped = [start for start, advice in calls if advice == MADV_PAGEOUT]
    assert soon(lambda: [s for s, a in calls if a == MADV_PAGEOUT].count(step.spans[0].start) > 1)
    assert set(dropped) == {span.start for span in step.spans}
    stream.close()


@linux_only
def test_a_system_that_drops_nothing_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(tmp_path / "weights", [8 * MB] * 6)
    monkeypatch.setattr(streaming, "MADV_PAGEOUT", 99)
    with pytest.raises(OSError, match="madvise"):
        WeightStream(step.spans)
    assert not [one for one in threading.enumerate() if one.name == "stem-edge-weights"]


@linux_only
def test_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from make_checkpoint import Shape, write_checkpoint

    monkeypatch.setattr(looking, "LEAST_NBYTES", 0)
    monkeypatch.setattr(streaming, "LEAST_NBYTES", 32 * mmap.PAGESIZE)
    write_checkpoint(tmp_path / "checkpoint", Shape(dim=512, d_ff=1024))
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")

    def answer() -> tuple[list[int], WeightStream | None]:
        with stem_edge.load(tmp_path / "bundle", cache_dir=tmp_path / "cache") as model:
            tokens = list(model.generate([1, 2, 3], max_new_tokens=20))
            return tokens, model.engine.backend.loaded.stream

    tokens, stream = answer()
    assert stream is None
    monkeypatch.setattr(streaming, "SPARE_NBYTES", 1 << 60)
    monkeypatch.setattr("stem_edge.runtime.backends.onnxruntime.loader.ROOMY", 1e12)
    again, stream = answer()
    assert again == tokens
    assert stream is not None
    assert not [one for one in threading.enumerate() if one.name == "stem-edge-weights"]
