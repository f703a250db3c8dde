"""Emulated flash: only time changes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import load_fixed
from stores import rows_of
from threads import together

from stem_edge.errors import InputError
from stem_edge.runtime.rows.emulated_flash import PROFILES, FlashProfile


def test_a_device_does_one_batch_after_the_other(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROFILES, "sdcard", FlashProfile(bandwidth=1e9, latency=0.03, depth=1))
    with load_fixed(tiny_bundle, emulate_flash="sdcard", warm_start=False) as model:
        store, started = rows_of(model).store, time.perf_counter()
        together([partial(store.read, np.array([record])) for record in (5, 6, 7)])
        assert time.perf_counter() - started >= 0.09


def test_an_unknown_profile_lists_the_known_ones(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="emulate_flash is 'floppy'; expected one of nvme, ufs4"):
        load_fixed(tiny_bundle, emulate_flash="floppy")


def test_on_slow_flash_the_layers_before_the_first_row_hide_a_read(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read runs while the first layers compute; the step waits only for the rest."""
    slow = FlashProfile(bandwidth=1e9, latency=0.2, depth=1)
    monkeypatch.setitem(PROFILES, "sdcard", slow)
    with load_fixed(tiny_bundle, emulate_flash="sdcard", warm_start=False) as model:
        engine = model.engine
        context = engine.open_context(8)
        begin = context.backend.begin

        def slow_begin(*args: Any, **options: Any) -> None:
            engine.rows._reading[1].result(60)  # type: ignore[attr-defined]
            begin(*args, **options)

        context.backend.begin = slow_begin  # type: ignore[method-assign]
        engine.expect(np.array([5]))
        engine.step(context, np.array([5]))
        assert engine.rows.counters().misses == 1
        assert engine.rows.counters().stall_seconds < slow.latency
