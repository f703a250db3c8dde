"""Weights that exceed the memory: which are read anew, when they are dropped, and the same tokens."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import stem_edge
from stem_edge.commands.main import main
from stem_edge.errors import StemEdgeError
from stem_edge.files import disk
from stem_edge.runtime.backends.onnxruntime.prepared import streaming
from stem_edge.runtime.backends.onnxruntime.prepared.streaming import (
    AHEAD_NBYTES,
    SPARE_NBYTES,
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
    spans = [Span(n, int(size * MB), 0, 0) for n, size in enumerate(sizes)]
    assert [span.start for span in spread(spans, excess * MB)] == chosen


class Step:
    """Six matrices of 8 MB in a mapped file, which are touched as a step does."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"x" * (6 * 8 * MB))
        self.files = ExitStack()
        file = self.files.enter_context(path.open("rb"))
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = np.frombuffer(self._map, np.uint8)
        places = [n * 8 * MB for n in range(6)]
        address = self._bytes.ctypes.data
        self.spans = [Span(address + place, 8 * MB, file.fileno(), place) for place in places]

    def touch(self, number: int) -> None:
        assert self._bytes[number * 8 * MB : (number + 1) * 8 * MB : mmap.PAGESIZE].all()

    def write(self, number: int) -> None:
        self._map[number * 8 * MB] = 9

    def is_written(self, number: int) -> bool:
        return self._map[number * 8 * MB] == 9

    def stream(self) -> WeightStream:
        return WeightStream(self.spans, self.files)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """These with so little free memory that none of them stays."""
    monkeypatch.setattr(streaming, "available_memory", lambda: SPARE_NBYTES)
    return Step(tmp_path / "weights")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is asked of the system, but for what is repeated by the clock: number of a matrix, advice."""
    found: Calls = []
    advise = WeightStream._advise

    def noted(stream: WeightStream, span: Span, advice: int) -> None:
        found.append((span.offset // (8 * MB), advice))
        advise(stream, span, advice)

    monkeypatch.setattr(WeightStream, "_advise", noted)
    monkeypatch.setattr(streaming, "LOOK_SECONDS", 60.0)
    return found


def soon(ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.002)
    return ready()


@linux_only
def test_what_was_written_to_a_matrix_is_not_dropped(step: Step, calls: Calls) -> None:
    for number in range(6):
        step.touch(number)
    step.write(2)
    stream = step.stream()
    dropped = [n for n in range(6) if n != 2]
    assert soon(lambda: [n for n, advice in calls if advice == mmap.MADV_DONTNEED] == dropped)
    assert step.is_written(2)
    stream.close()


@linux_only
def test_a_matrix_is_dropped_once_the_next_is_touched(step: Step, calls: Calls) -> None:
    stream, ahead = step.stream(), AHEAD_NBYTES // (8 * MB)
    expected = [(n, mmap.MADV_DONTNEED) for n in range(6)]
    expected += [(n, mmap.MADV_WILLNEED) for n in range(ahead)]
    assert soon(partial(calls.__eq__, expected))
    with stream.step():
        step.touch(0)
        for number in [1, 2, 3, 4, 5, 0, 1]:  # the next step begins anew
            step.touch(number)
            before = (number - 1) % 6
            expected += [(before, mmap.MADV_DONTNEED), ((before + ahead) % 6, mmap.MADV_WILLNEED)]
            assert soon(partial(calls.__eq__, expected)), number
    stream.close()
    assert calls == expected


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[WeightStream]:
    """Those of loads from now on, which find that nothing fits into memory."""
    found, made = list[WeightStream](), WeightStream

    def opened(spans: Sequence[Span], files: ExitStack) -> WeightStream:
        found.append(made(spans, files))
        return found[-1]

    monkeypatch.setattr(streaming, "WeightStream", opened)
    monkeypatch.setattr(streaming, "LEAST_NBYTES", 32 * mmap.PAGESIZE)
    monkeypatch.setattr(streaming, "available_memory", lambda: 0)
    monkeypatch.setattr("stem_edge.runtime.backends.onnxruntime.loader.ROOMY", 1e12)
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from make_checkpoint import Shape, write_checkpoint

    folder = tmp_path_factory.mktemp("streamed")
    write_checkpoint(folder / "checkpoint", Shape(dim=512, d_ff=1024))
    stem_edge.export_bundle(folder / "checkpoint", folder / "bundle", type="int8")
    assert main(["prepare", str(folder / "bundle"), "--cache-dir", str(folder / "cache")]) == 0
    return folder / "bundle"


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "stem-edge-weights"]


@linux_only
def test_the_same_tokens(bundle: Path, streams: list[WeightStream]) -> None:
    def answer() -> str:
        with stem_edge.load(bundle, cache_dir=bundle.parent / "cache") as model:
            return model.generate_text([1, 2, 3], max_new_tokens=20)

    with stem_edge.load(bundle, cache_dir=bundle.parent / "none") as model:
        tokens = model.generate_text([1, 2, 3], max_new_tokens=20)
    assert not streams
    assert answer() == tokens
    (stream,) = streams
    assert len(stream.chosen) > 3
    assert not threads()


@linux_only
def test_a_step_that_fails_and_a_model_that_is_closed(
    bundle: Path, streams: list[WeightStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would otherwise go on to drop pages, at last those of whatever comes to lie there."""
    broken = set[str]()

    def breaking(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if name in broken:
                raise OSError("broken")
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    breaking(disk, "pread")
    breaking(ort.InferenceSession, "run_with_iobinding")  # before sessions bind it
    model = stem_edge.load(bundle, cache_dir=bundle.parent / "cache")
    expected = model.generate_text([1, 2, 3], max_new_tokens=4)
    for name in ("pread", "run_with_iobinding"):
        broken.add(name)
        with pytest.raises(
            (StemEdgeError, OSError)
        ):  # an OSError of a run is not onnxruntime's own
            model.generate_text([4, len(name), 3])
        broken.clear()
        assert model.generate_text([1, 2, 3], max_new_tokens=4) == expected
    assert threads()
    model.close()
    assert not threads()
