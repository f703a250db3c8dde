"""Emulated flash: only time changes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from loading import load_fixed
from threads import together

from stem_edge.errors import InputError


def test_a_device_does_one_read_after_the_other(tiny_bundle: Path) -> None:
    texts = [[*range(start, start + 100)] for start in (0, 100)]
    with load_fixed(tiny_bundle) as model:
        expected = [model.logits(ids) for ids in texts]
    with load_fixed(tiny_bundle, emulate_flash="sdcard") as model:
        started = time.perf_counter()
        found = together([partial(model.logits, ids) for ids in texts])
        assert (
            time.perf_counter() - started >= 200 * 0.7e-3
        )  # as the least time is what is emulated
    assert all(map(np.array_equal, found, expected))


def test_an_unknown_profile_lists_the_known_ones(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="emulate_flash is 'floppy'; expected one of nvme, ufs4"):
        load_fixed(tiny_bundle, emulate_flash="floppy")
