"""Which execution providers can be used here, and what would bring the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.runtime import plugins
from stem_edge.runtime.provider_names import KNOWN
from stem_edge.runtime.providers import available_names, checked_libraries, find

# Of a device's metadata, the first that is there: onnxruntime's word on Windows, and OpenVINO's.
NAMES = ("Description", "FULL_DEVICE_NAME")


@dataclass(frozen=True)
class ListedDevice:
    """A device that onnxruntime lists for a provider."""

    name: str  # or its ids, where nobody says
    vendor: str
    kind: str  # GPU, NPU or CPU
    own_memory: bool  # arrays can lie in memory of its own


@dataclass(frozen=True)
class Listed:
    """A provider, and whether it can be used here."""

    name: str  # for `providers` of stem_edge.load
    full: str  # onnxruntime's name; empty where only its library, which cannot be used, would tell
    available: bool
    own_memory: bool
    devices: tuple[ListedDevice, ...]  # of built-in providers onnxruntime may list none
    reason: str  # why it is not available, and what to do; empty if it is


def providers(libraries: Mapping[str, str | Path] | None = None) -> list[Listed]:
    """All that have a name here; each is tried. libraries: see stem_edge.load. Raises InputError."""
    more = checked_libraries(libraries)
    found = [_listed(name, more) for name in dict.fromkeys([*more, *KNOWN])]
    # What the tries registered shows only now.
    rest = [name for name in available_names() if name not in {listed.name for listed in found}]
    fulls = {listed.full for listed in found}
    return found + [other for other in (_listed(n, more) for n in rest) if other.full not in fulls]


def _listed(name: str, libraries: Mapping[str, str | Path]) -> Listed:
    try:
        provider = find(name, {}, libraries)
    except (BackendError, OutOfMemoryError) as error:
        full = KNOWN[name].full if name in KNOWN else ""
        return Listed(name, full, False, False, (), str(error))
    devices = tuple(describe(device) for device in plugins.registered_devices(provider.full))
    return Listed(name, provider.full, True, provider.own_memory, devices, "")


def describe(device: Any) -> ListedDevice:
    """An OrtEpDevice as onnxruntime lists it."""
    hardware = device.device
    told = {**device.ep_metadata, **hardware.metadata}
    ids = f"{hardware.vendor_id:#06x}:{hardware.device_id:#06x}"
    name = next((str(told[key]) for key in NAMES if told.get(key)), ids)
    return ListedDevice(
        name, str(hardware.vendor), plugins.kind_of(device), plugins.has_memory(device)
    )
