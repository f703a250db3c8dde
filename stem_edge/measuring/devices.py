"""Devices that a bundle may be meant for: what one program can have of each.

Round numbers in the middle of what such devices offer, for planning and for runs inside limits. A
device at hand is better measured than looked up here.
"""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.errors import InputError
from stem_edge.runtime.flash import FlashName


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    name: str
    memory: int  # bytes that one program may take, mapped files included, before it gets killed
    cpus: int  # fast cores
    bandwidth: float  # bytes a second that these cores read from memory together
    flash: FlashName
    what: str


def _device(
    name: str, memory: float, cpus: int, bandwidth: float, flash: FlashName, what: str
) -> Device:
    return Device(name, int(memory * 1e9), cpus, bandwidth * 1e9, flash, what)


# memory in GB, bandwidth in GB/s
DEVICES = {
    device.name: device
    for device in (
        _device("phone-4gb", 1.2, 4, 10, "ufs2", "a phone of the lower half, 4 GB"),
        _device("phone-8gb", 3.0, 4, 25, "ufs4", "a phone of the upper half, 8 GB"),
        _device("phone-12gb", 5.0, 4, 40, "ufs4", "a large phone, 12 GB"),
        _device("pi4", 3.0, 4, 4, "sdcard", "Raspberry Pi 4 with 4 GB and an SD card"),
        _device("pi5", 6.5, 4, 10, "sdcard", "Raspberry Pi 5 with 8 GB and an SD card"),
        _device("laptop-8gb", 4.5, 4, 25, "nvme", "a laptop with 8 GB"),
        _device("laptop-16gb", 11.0, 6, 40, "nvme", "a laptop with 16 GB"),
    )
}


def find_device(name: str) -> Device:
    """The device of a name. Raises InputError, which lists them."""
    if name not in DEVICES:
        raise InputError(f"device {name!r} is not known; expected one of {', '.join(DEVICES)}")
    return DEVICES[name]
