"""Execution providers of onnxruntime: resolves the names that users give, and lists what is usable.

Some are built into the installed onnxruntime package, others come as plug-in libraries. onnxruntime
falls back to the CPU when one cannot start; here that is an error that says what to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stem_edge.errors import BackendError, InputError, OutOfMemoryError
from stem_edge.runtime.backends.onnxruntime.providers import start as provider_start
from stem_edge.runtime.backends.onnxruntime.providers.names import (
    AUTO,
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
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider, ort

# Metadata keys of a device's name, by preference: onnxruntime's on Windows, then OpenVINO's.
NAMES = ("Description", "FULL_DEVICE_NAME")


@dataclass(frozen=True)
class ListedDevice:
    """A device that onnxruntime lists for a provider."""

    name: str  # or vendor and device id, if it has no name
    vendor: str
    kind: str  # GPU, NPU or CPU
    own_memory: bool  # arrays can lie in its memory


@dataclass(frozen=True)
class ListedProvider:
    """A provider, and whether it can be used here."""

    name: str  # for `providers` of stem_edge.load
    full: str  # onnxruntime's name; "" if only a library that cannot be used knows it
    available: bool
    own_memory: bool
    devices: tuple[ListedDevice, ...]  # may be empty for built-in providers
    reason: str  # why it is not available, and what to do; "" if it is


class UnavailableError(BackendError):
    """A provider is in no installed package; the message says how to install it."""


def resolve(wanted: Wanted, libraries: Libraries = None) -> tuple[Provider, ...]:
    """Return the providers that the options of stem_edge.load name, in their order.

    None is the CPU alone; "auto" the first with its own memory that starts here, else the CPU.
    The CPU at the end runs operators that the providers before it lack. libraries: name -> path of
    a plug-in.

    Raises InputError for invalid names and options; BackendError for a provider that is not
    available, which says how to install it.
    """
    paths, pairs = checked_libraries(libraries), named(wanted)
    if pairs == [(AUTO, {})]:
        return (next(_accelerators(paths), CPU),)
    found = tuple(_available(name, options, paths) for name, options in pairs)
    _check_together(found)
    return found


def has_own_memory(provider: Provider) -> bool:
    """Tell whether arrays can lie in memory of its device rather than of this process."""
    if provider.devices:
        return any(map(provider_start.has_memory, provider.devices))
    return bool(provider.name in KNOWN and KNOWN[provider.name].memory)


def _accelerators(libraries: Mapping[str, str | Path]) -> Iterator[Provider]:
    """Yield usable providers with their own memory, the preferred one first."""
    for name in [*libraries, *(name for name in PREFERRED if name not in libraries)]:
        try:
            provider = find(name, {}, libraries)
        except (BackendError, OutOfMemoryError):
            if name in libraries:  # must not be skipped silently: the user named it
                raise
            continue
        if has_own_memory(provider):
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
            f"providers has {plugged[0]}, a plug-in, and {built_in[0]}, which is built in; "
            "onnxruntime takes only one of the two kinds: leave one out"
        )


def find(name: str, options: dict[str, str], libraries: Mapping[str, str | Path]) -> Provider:
    """Return the provider of a name after a trial start. Raises InputError, BackendError."""
    short = short_name(name)
    if short == CPU.name:
        if options:  # onnxruntime ignores them, rather than refuse them
            raise InputError(f"providers: cpu has no options, but {', '.join(options)} is given")
        return CPU
    if name.lower() in libraries or short in libraries:
        key = name.lower() if name.lower() in libraries else short
        return _of_library(key, libraries[key], options)
    known = KNOWN.get(short)
    full = known.full if known else _full_name(name, [*libraries])
    short = short if known else short_name(full)
    # Registered by an earlier call or by the embedding program, or built in.
    devices = provider_start.registered_devices(full)
    if devices:
        return Provider(short, full, options, provider_start.preferred(devices))
    library = provider_start.package_library(known.module) if known and known.module else None
    if library is not None:  # must come first: registered plug-ins count as available below
        return _of_library(short, library, options)
    if full in ort.get_available_providers():
        provider = Provider(short, full, options)
        provider_start.check_starts(provider)
        return provider
    raise UnavailableError(known.bring if known else "no installed package has it")


def _of_library(name: str, library: str | Path, options: dict[str, str]) -> Provider:
    full = KNOWN[name].full if name in KNOWN else name
    devices = provider_start.register(full, library)
    if not devices:
        raise BackendError(
            f"{name}: {library} finds no device here that it can use; onnxruntime sees "
            f"{_hardware()}. Install the device's driver; in a container, expose the device to it "
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
    """Return a provider's name as onnxruntime spells it. Raises InputError for an unknown one."""
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
    """Return short names of built-in and registered providers, in onnxruntime's order."""
    fulls = [*ort.get_available_providers(), *(d.ep_name for d in ort.get_ep_devices())]
    names = dict.fromkeys(short_name(full) for full in fulls)
    return [name for name in names if name not in ELSEWHERE]


def providers(libraries: Libraries = None) -> list[ListedProvider]:
    """List the known providers after a trial start of each. Raises InputError.

    libraries: name -> path of a plug-in, as for stem_edge.load.
    """
    more = checked_libraries(libraries)
    found = [_listed(name, more) for name in dict.fromkeys([*more, *KNOWN])]
    # Looked up last, because the trial starts register further providers.
    rest = [name for name in available_names() if name not in {listed.name for listed in found}]
    fulls = {listed.full for listed in found}
    return found + [other for other in (_listed(n, more) for n in rest) if other.full not in fulls]


def _listed(name: str, libraries: Mapping[str, str | Path]) -> ListedProvider:
    try:
        provider = find(name, {}, libraries)
    except (BackendError, OutOfMemoryError) as error:
        full = KNOWN[name].full if name in KNOWN else ""
        return ListedProvider(name, full, False, False, (), str(error))
    devices = tuple(describe(device) for device in provider_start.registered_devices(provider.full))
    return ListedProvider(name, provider.full, True, has_own_memory(provider), devices, "")


def describe(device: Any) -> ListedDevice:
    """Return name, vendor and kind of an OrtEpDevice."""
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
