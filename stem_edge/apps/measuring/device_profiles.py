"""Profiles of devices: the memory, cores and flash that one program can use there.

The numbers are round, from the middle of what such devices offer, for planning and for runs inside
limits. If you have the device, measure there instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.errors import InputError
from stem_edge.runtime.rows.files import FlashName


@dataclass(frozen=True)
class Device:
    """Memory, cores and flash that one program can count on."""

    name: str
    memory: int  # bytes, mapped files included, that a program may take before it gets killed
    cpus: int  # fast cores
    bandwidth: float  # bytes a second that these cores together read from memory
    flash: FlashName
    what: str


DEVICES = {
    device.name: device
    for device in (
        Device("phone-4gb", 1_200_000_000, 4, 10e9, "ufs2", "a phone of the lower half, 4 GB"),
        Device("phone-8gb", 3_000_000_000, 4, 25e9, "ufs4", "a phone of the upper half, 8 GB"),
        Device("phone-12gb", 5_000_000_000, 4, 40e9, "ufs4", "a large phone, 12 GB"),
        Device("pi4", 3_000_000_000, 4, 4e9, "sdcard", "Raspberry Pi 4, 4 GB, SD card"),
        Device("pi5", 6_500_000_000, 4, 10e9, "sdcard", "Raspberry Pi 5, 8 GB, SD card"),
        Device("laptop-8gb", 4_500_000_000, 4, 25e9, "nvme", "a laptop with 8 GB"),
        Device("laptop-16gb", 11_000_000_000, 6, 40e9, "nvme", "a laptop with 16 GB"),
    )
}


def find_device(name: str) -> Device:
    """Return the device of this name. Raises InputError, which lists all names."""
    if name not in DEVICES:
        raise InputError(f"device {name!r} is not known; expected one of {', '.join(DEVICES)}")
    return DEVICES[name]
