"""Run calls in threads at the same time, and poison slots to expose stale readers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from stores import rows_of

from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.model import Model
from stem_edge.runtime.rows.slots import ArraySlots, Slots

T = TypeVar("T")
WATCHDOG_SECONDS = 300.0


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run each call in its own thread and return their results. Raises the first error."""
    results: list[T | None] = [None] * len(calls)
    errors: list[BaseException] = []
    gate = threading.Barrier(len(calls))

    def run(number: int) -> None:
        gate.wait(60)
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def tokens(model: Model, prompt: Sequence[int], count: int = 12) -> list[int]:
    """Generate greedily."""
    return [t for c in model.generate(prompt, max_new_tokens=count) for t in c.token_ids]


class Poisoned(Slots):
    """Slots that hold NaN from eviction until the new row is written."""

    def __init__(self, slots: Slots, while_poisoned: Callable[[], object]) -> None:
        self.layout, self.count = slots.layout, slots.count
        self.writes = 0
        self._slots, self._while_poisoned = slots, while_poisoned

    @property
    def slot_nbytes(self) -> int:
        return self._slots.slot_nbytes

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        for array in _arrays(self._slots):
            array.reshape(self.count, -1).view(np.uint8)[slots] = 0xFF  # NaN in every float
        self._while_poisoned()
        self.writes += 1
        self._slots.write(slots, records)


def _arrays(slots: Slots) -> list[npt.NDArray[Any]]:
    if isinstance(slots, BlockSlots):
        return [part for parts in slots.rows for part in parts]
    assert isinstance(slots, ArraySlots)
    arrays: list[npt.NDArray[Any]] = [part for parts in slots.codes for part in parts]
    return arrays + [part for parts in slots.scales for part in parts]


def poison(model: Model, while_poisoned: Callable[[], object]) -> Poisoned:
    """Poison this model's slots from now on, whenever they change."""
    cache = rows_of(model).cache
    made = Poisoned(cache.storage, while_poisoned)
    cache.storage = made
    return made


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in another process, which a watchdog ends."""
    head = (
        f"import faulthandler; faulthandler.dump_traceback_later({WATCHDOG_SECONDS}, exit=True)\n"
    )
    command = [sys.executable, "-c", head + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
