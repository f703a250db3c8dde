"""Profiles of devices."""

from __future__ import annotations

import pytest

from stem_edge.apps.measuring.device_profiles import DEVICES, find_device
from stem_edge.errors import InputError
from stem_edge.runtime.rows.emulated_flash import PROFILES


def test_devices_are_complete_and_found_by_name() -> None:
    for name, device in DEVICES.items():
        assert find_device(name) is device
        assert (
            device.flash in PROFILES
            and 1e9 <= device.memory <= 64e9
            and 1 <= device.cpus <= 16 < device.bandwidth
        )
    with pytest.raises(InputError, match=r"'pi9' is not known; expected one of .*pi5"):
        find_device("pi9")
