"""Execution providers of onnxruntime: how users name them, and what stands behind a name here.

Some are built into the installed onnxruntime package, others come as plug-in libraries. onnxruntime
itself falls back to the CPU when one cannot start; here that is an error which says what to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stem_edge.errors import BackendError, InputError, OutOfMemoryError
from stem_edge.runtime.backends.onnxruntime.providers import start as provider_start
from stem_edge.runtime.backends.onnxruntime.providers.names import (
    AUTO,
    CPU_NAME,
    ELSEWHERE,
    KNOWN,
    PREFERRED,
    Libraries,
    Wanted,
    checked_libraries,
    full_names,
    named,
    short_name,
)
from stem_edge.runtime.backends.onnxruntime.providers.ort_module import ort

# Of a device's metadata, the first that is there: onnxruntime's word on Windows, and OpenVINO's.
NAMES = ("Description", "FULL_DEVICE_NAME")


@dataclass(frozen=True)
class Provider:
    """An execution provider that is available, as a session is opened on it."""

    name: str  # the short one, for people
    full: str  # onnxruntime's
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Any, ...] = ()  # OrtEpDevice; of built-in providers none

    @property
    def on_cpu(self) -> bool:
        """Whether this is onnxruntime's own, which runs everything."""
        return self.full == CPU_NAME

    @property
    def own_memory(self) -> bool:
        """Whether arrays can lie in memory of its device, and not in that of this process."""
        if self.devices:
            return any(map(provider_start.has_memory, self.devices))
        return bool(self.name in KNOWN and KNOWN[self.name].memory)


CPU = Provider("cpu", CPU_NAME)


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


class UnavailableError(BackendError):
    """Nothing that is installed here has the provider; says what would bring it."""


def resolve(wanted: Wanted, libraries: Libraries = None) -> tuple[Provider, ...]:
    """What `providers` and `provider_libraries` of stem_edge.load name, in their order.

    None is the CPU alone; "auto" the first with memory of its own that starts here, else the CPU.
    CPU at the end allows operators on the CPU that the providers before it lack. libraries: paths
    of plug-ins by the names to use them by.

    Raises InputError for names and options that make no sense, BackendError for a provider that is
    not available, saying which package brings it.
    """
    paths, pairs = checked_libraries(libraries), named(wanted)
    if pairs == [(AUTO, {})]:
        return (next(_accelerators(paths), CPU),)
    found = tuple(_available(name, options, paths) for name, options in pairs)
    _check_together(found)
    return found


def _accelerators(libraries: Mapping[str, str | Path]) -> Iterator[Provider]:
    """Providers with memory of their own that can be used here, the preferred first."""
    for name in [*libraries, *(name for name in PREFERRED if name not in libraries)]:
        try:
            provider = find(name, {}, libraries)
        except (BackendError, OutOfMemoryError):  # not here: that is what "auto" asks
            if name in libraries:  # but this one the user says is here
                raise
            continue
        if provider.own_memory:
            yield provider


def _available(name: str, options: dict[str, str], libraries: Mapping[str, str | Path]) -> Provider:
    try:
        return find(name, options, libraries)
    except UnavailableError as error:
        raise BackendError(
            f"{short_name(name)} is not available: {error}; available here: "
            f"{', '.join(available_names())}"
        ) from error


def _check_together(found: Sequence[Provider]) -> None:
    fulls = [provider.full for provider in found]
    twice = [provider.name for provider in found if fulls.count(provider.full) > 1]
    if twice:
        raise InputError(f"providers has {twice[0]} more than once; name each once")
    plugged = [provider.name for provider in found if provider.devices]
    built_in = [p.name for p in found if not p.devices and not p.on_cpu]
    if plugged and built_in:
        raise InputError(
            f"providers has {plugged[0]}, which is opened by its devices, and {built_in[0]}, by its "
            "name; onnxruntime takes only one of the kinds: leave one of them out"
        )


def find(name: str, options: dict[str, str], libraries: Mapping[str, str | Path]) -> Provider:
    """The provider of one name, once it starts. Raises InputError, BackendError."""
    short = short_name(name)
    if short == CPU.name:
        if options:  # onnxruntime would take any, and do nothing with them
            raise InputError(f"providers: cpu has no options, and {', '.join(options)} is given")
        return CPU
    if name.lower() in libraries or short in libraries:
        key = name.lower() if name.lower() in libraries else short
        return _of_library(key, libraries[key], options)
    known = KNOWN.get(short)
    full = known.full if known else _full_name(name, [*libraries])
    short = short if known else short_name(full)
    devices = provider_start.registered_devices(
        full
    )  # by us, by the program around us, or built in
    if devices:
        return Provider(short, full, options, provider_start.preferred(devices))
    library = provider_start.package_library(known.module) if known and known.module else None
    if library is not None:  # first, for onnxruntime calls available what is registered
        return _of_library(short, library, options)
    if full in ort.get_available_providers():
        provider = Provider(short, full, options)
        provider_start.check_starts(provider)
        return provider
    raise UnavailableError(known.bring if known else "nothing that is installed brings it")


def _of_library(name: str, library: str | Path, options: dict[str, str]) -> Provider:
    full = KNOWN[name].full if name in KNOWN else name
    devices = provider_start.register(full, library)
    if not devices:
        raise BackendError(
            f"{name}: {library} finds no device here that it could use; onnxruntime sees "
            f"{_hardware()}. Install the driver of the device; in a container, show it the device "
            "(on Linux also /sys/class/drm)"
        )
    ours = [device for device in devices if device.ep_name == full] or [
        device for device in devices if device.ep_name == devices[0].ep_name
    ]
    return Provider(name, str(ours[0].ep_name), options, provider_start.preferred(ours))


def _hardware() -> str:
    kinds = {provider_start.kind_of(device) for device in ort.get_ep_devices()}
    return (
        "only the CPU" if kinds <= {"CPU"} else f"devices of the kinds {', '.join(sorted(kinds))}"
    )


def _full_name(name: str, more: Sequence[str]) -> str:
    """onnxruntime's spelling of a name of its own; raises InputError if it has none such."""
    listed = [str(device.ep_name) for device in ort.get_ep_devices()]
    fulls = {full.lower(): full for full in [*full_names(), *listed]}
    shorts = {short_name(full): full for full in fulls.values()}
    found = fulls.get(name.lower()) or shorts.get(name.lower())
    if found:
        return found
    close = get_close_matches(short_name(name), {*KNOWN, *more, *shorts}, n=3)
    raise InputError(
        f"providers has {name!r}, which onnxruntime {ort.__version__} does not know; "
        + (f"did you mean {' or '.join(close)}?" if close else f"expected {', '.join(KNOWN)}")
    )


def available_names() -> list[str]:
    """Short names of what is built in and registered, as onnxruntime orders them."""
    fulls = [*ort.get_available_providers(), *(d.ep_name for d in ort.get_ep_devices())]
    names = dict.fromkeys(short_name(full) for full in fulls)
    return [name for name in names if name not in ELSEWHERE]


def providers(libraries: Libraries = None) -> list[Listed]:
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
    devices = tuple(describe(device) for device in provider_start.registered_devices(provider.full))
    return Listed(name, provider.full, True, provider.own_memory, devices, "")


def describe(device: Any) -> ListedDevice:
    """An OrtEpDevice as onnxruntime lists it."""
    hardware = device.device
    told = {**device.ep_metadata, **hardware.metadata}
    ids = f"{hardware.vendor_id:#06x}:{hardware.device_id:#06x}"
    name = next((str(told[key]) for key in NAMES if told.get(key)), ids)
    return ListedDevice(
        name,
        str(hardware.vendor),
        provider_start.kind_of(device),
        provider_start.has_memory(device),
    )
