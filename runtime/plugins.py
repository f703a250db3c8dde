"""Libraries that bring execution providers to onnxruntime while it runs, and the devices they use.

A library is code: it comes from a package that is installed, or from a path that the user names;
never from a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stem_edge.errors import BackendError
from stem_edge.runtime.backend import reason
from stem_edge.runtime.ort_module import ort

# What a library of some system begins with: ELF, PE, Mach-O of one and of several processors.
MAGICS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
LIBRARY_PATH = "library_path"  # onnxruntime tells a device's library in its metadata
KINDS = ("GPU", "NPU", "CPU")  # of devices, the preferred first


def package_library(module: str) -> Path | None:
    """The library of an installed package; None where it is not installed.

    Raises BackendError if the package has none for this system.
    """
    if find_spec(module) is None:
        return None
    try:
        return Path(import_module(module).get_library_path())
    except Exception as error:  # packages raise what they like
        raise BackendError(
            f"the package {module} is installed, but finds no library of its own ({reason(error)}); "
            "install it again"
        ) from error


def register(name: str, library: str | Path) -> list[Any]:
    """The devices (OrtEpDevice) that a provider library brings; it stays registered, once.

    name: for onnxruntime to remember it by. Raises BackendError.
    """
    path = _checked(name, library)
    found = devices_of(path)
    if found:
        return found
    try:
        ort.register_execution_provider_library(name, str(path))
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        if "already registered" not in str(error):
            raise BackendError(
                f"{name}: {path} is no library of an execution provider that onnxruntime "
                f"{ort.__version__} can use here ({reason(error)}); expected the library of a plug-in"
            ) from error
    return devices_of(path)


def registered_devices(full: str) -> list[Any]:
    """All devices that onnxruntime lists for a provider, of whatever library."""
    return [device for device in ort.get_ep_devices() if device.ep_name == full]


def devices_of(path: Path) -> list[Any]:
    """The devices that onnxruntime lists for a library."""
    return [
        device
        for device in ort.get_ep_devices()
        if device.ep_metadata.get(LIBRARY_PATH) and _same(path, device.ep_metadata[LIBRARY_PATH])
    ]


def preferred(devices: Sequence[Any]) -> tuple[Any, ...]:
    """One of the devices of a provider: a GPU before others, onnxruntime's order within a kind."""
    return tuple(sorted(devices, key=lambda device: KINDS.index(kind_of(device)))[:1])


def kind_of(device: Any) -> str:
    """GPU, NPU or CPU."""
    name = str(device.device.type.name)
    return name if name in KINDS else KINDS[-1]


def has_memory(device: Any) -> bool:
    """Whether arrays can be allocated in memory of the device."""
    return device.memory_info(ort.OrtDeviceMemoryType.DEFAULT) is not None


def _checked(name: str, library: str | Path) -> Path:
    """Its absolute path: onnxruntime would look for others in its own folder.

    A file that is no library is refused by the system, too; one that was cut off ends the process.
    """
    path = Path(library).absolute()
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise BackendError(
            f"{name}: cannot read the provider library {path} ({error.strerror}); expected the path "
            "of a library file"
        ) from error
    if not begin.startswith(MAGICS):
        raise BackendError(
            f"{name}: {path} is no library: it begins with {begin!r}; expected the library of an "
            "onnxruntime execution provider"
        )
    return path


def _same(path: Path, other: str) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
