"""The KV cache of layers with a window: what a step finds there, and what an interrupt leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from interrupts import interrupted
from tiers import slow_but

from stem_edge.graph import names as io
from stem_edge.runtime.backends.onnxruntime.kv_window import KvWindow

LENGTH = 2000


def make(window: int) -> tuple[KvWindow, list[npt.NDArray[Any]]]:
    """Make a cache of two layers; its cells hold NaN until tokens get there."""
    shape = (1, 2, io.kv_capacity(window, LENGTH), 64)
    arrays = [np.full(shape, np.nan, np.float32) for _ in range(4)]
    return KvWindow(arrays, window), arrays


def put(cache: KvWindow, arrays: list[npt.NDArray[Any]], position: int, count: int) -> int:
    """Make room for tokens and write their positions; return the position of the first row."""
    base = cache.make_room(position, count)
    cells = np.arange(position, position + count)[:, None]
    for number, array in enumerate(arrays):
        array[:, :, position - base : position - base + count] = cells + LENGTH * number
    return base


def holds(arrays: list[npt.NDArray[Any]], base: int, start: int, stop: int) -> bool:
    """Return whether each array holds the tokens of these positions."""
    cells = np.arange(start, stop)[:, None]
    return all(
        (array[:, :, start - base : stop - base] == cells + LENGTH * number).all()
        for number, array in enumerate(arrays)
    )


@pytest.mark.parametrize("window", [1, 2, 7, 128, 129, 512])
@pytest.mark.parametrize(
    "sizes", slow_but([[100, 1], [3, 128, 7]], [[1], [128], [100, 1], [3, 128, 7], [2]])
)
def test_a_step_finds_its_windows(window: int, sizes: list[int]) -> None:
    cache, arrays = make(window)
    position = turn = shifts = last = 0
    while position < LENGTH - 128:
        count = sizes[turn % len(sizes)]
        base = put(cache, arrays, position, count)
        assert base % io.WINDOW_BLOCK == 0
        assert holds(arrays, base, max(0, position - window + 1), position + count)
        shifts, last = shifts + (base > last), base
        position, turn = position + count, turn + 1
    assert shifts >= 4  # otherwise nothing would have been tested
    assert shifts <= LENGTH / io.WINDOW_BLOCK  # never fewer tokens at once than a block


@pytest.mark.parametrize("window", [2, 300])
def test_an_interrupt_loses_nothing(window: int) -> None:
    code = {KvWindow.make_room.__code__, KvWindow._finish.__code__}
    for at in range(1000):
        cache, arrays = make(window)
        position = window + io.WINDOW_BLOCK + io.STEP_TOKENS - 5
        for start in range(0, position, 100):
            put(cache, arrays, start, min(100, position - start))
        ended = not interrupted(lambda: cache.make_room(position, 8), at, code.__contains__)  # noqa: B023
        base = put(cache, arrays, position, 8)
        assert base > 0 and holds(arrays, base, position - window + 1, position + 8)
        if ended:
            break
    assert 8 < at < 999
