"""The bandwidth of memory, which bounds the speed."""

from __future__ import annotations

import pytest

from stem_edge.errors import InputError
from stem_edge.measuring.memory.device_profiles import find_device
from stem_edge.measuring.planning.bandwidth import bandwidth_of


def test_a_bandwidth_is_given_or_that_of_a_device_or_measured() -> None:
    device = find_device("pi5")
    assert bandwidth_of(device, "2GB", 1) == (2e9, "2 GB/s, as given")
    assert bandwidth_of(device, None, 1) == (10e9, "10 GB/s, stated for pi5")
    here = bandwidth_of(None, None, 1)
    assert here.rate > 1e8 and here.source.endswith("measured on this machine, 1 threads")
    with pytest.raises(InputError, match="bandwidth is 17 bytes a second, which is too little"):
        bandwidth_of(None, 17, 1)
