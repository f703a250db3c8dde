"""Trial starts of execution providers: finding and registering their libraries and devices.

A library is code, so it comes only from an installed package or a path that the user names, never
from a bundle. onnxruntime lists every provider that its package was built with, even if it cannot
start here, and then silently leaves it out of sessions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from stem_edge.errors import BackendError
from stem_edge.runtime.backends.interface import check_memory, reason
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider, ort
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session

# First bytes of a library: ELF, PE, Mach-O for one and for several processors.
MAGICS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
LIBRARY_PATH = "library_path"  # key of a device's metadata
KINDS = ("GPU", "NPU", "CPU")  # of devices, the preferred one first
# y = -x for one float: the smallest graph that onnxruntime opens a session for.
LEAST_GRAPH = (
    b'\x08\x08:2\n\x0b\n\x01x\x12\x01y"\x03Neg\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04'
    b"\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
CUDA = "CUDAExecutionProvider"
NVIDIA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
INSTALL_CUDA = 'install CUDA\'s libraries with: pip install "onnxruntime-gpu[cuda,cudnn]"'
LOOK = "see onnxruntime's documentation for what this provider needs"


def package_library(module: str) -> Path | None:
    """Return the library in a plug-in package; None if the package is not installed.

    Raises BackendError if the package has no library for this system.
    """
    if find_spec(module) is None:
        return None
    try:
        return Path(import_module(module).get_library_path())
    except Exception as error:  # because importing it runs code of others
        raise BackendError(
            f"the package {module} is installed, but cannot find its library ({reason(error)}); "
            "install it again"
        ) from error


def register(name: str, library: str | Path) -> list[Any]:
    """Register a provider library if it is new, and return its devices (OrtEpDevice).

    name: the one to register it under. Raises BackendError.
    """
    path = _checked(name, library)
    found = devices_of(path)
    if found:
        return found
    try:
        ort.register_execution_provider_library(name, str(path))
    except Exception as error:  # because onnxruntime's exceptions share no base class
        if "already registered" not in str(error):
            raise BackendError(
                f"{name}: onnxruntime {ort.__version__} cannot use {path} here ({reason(error)}); "
                "expected the library of a plug-in execution provider"
            ) from error
    return devices_of(path)


def registered_devices(full: str) -> list[Any]:
    """Return the devices that onnxruntime lists for a provider, from any library."""
    return [device for device in ort.get_ep_devices() if device.ep_name == full]


def devices_of(path: Path) -> list[Any]:
    """Return the devices that onnxruntime lists for a library."""
    return [
        device
        for device in ort.get_ep_devices()
        if device.ep_metadata.get(LIBRARY_PATH) and _same(path, device.ep_metadata[LIBRARY_PATH])
    ]


def preferred(devices: Sequence[Any]) -> tuple[Any, ...]:
    """Return one device of a provider: GPU before NPU before CPU, the first of its kind."""
    return tuple(sorted(devices, key=lambda device: KINDS.index(kind_of(device)))[:1])


def kind_of(device: Any) -> str:
    """Return GPU, NPU or CPU."""
    name = str(device.device.type.name)
    return name if name in KINDS else KINDS[-1]


def has_memory(device: Any) -> bool:
    """Return whether arrays can be allocated in memory of the device."""
    return device.memory_info(ort.OrtDeviceMemoryType.DEFAULT) is not None


def _checked(name: str, library: str | Path) -> Path:
    """Return the library's absolute path after a look at the file. Raises BackendError.

    Absolute because onnxruntime looks up relative paths in its own folder.
    """
    path = Path(library).absolute()
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise BackendError(
            f"{name}: cannot read the provider library {path} ({error.strerror}); expected the "
            "path of a library file"
        ) from error
    if not begin.startswith(MAGICS):
        raise BackendError(
            f"{name}: {path} is not a library: it begins with {begin!r}; expected the library of "
            "an onnxruntime execution provider"
        )
    return path


def _same(path: Path, other: str) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def check_starts(provider: Provider) -> None:
    """Raise BackendError with the reason if a built-in provider cannot start; OutOfMemoryError."""
    name, full, advice = provider.name, provider.full, LOOK
    if full == CUDA:
        advice = INSTALL_CUDA
        _check_driver(name)
        _preload_cuda(name)
    try:
        session = new_session(LEAST_GRAPH, 1, [provider])
    except Exception as error:  # because onnxruntime's exceptions share no base class
        check_memory(error, f"to start {name}")
        raise BackendError(f"{name} cannot start here ({reason(error)}); {advice}") from error
    if full not in session.get_providers():
        raise BackendError(f"{name} cannot start here: {_why(full)}; {advice}")


def _check_driver(name: str) -> None:
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError as error:
        raise BackendError(
            f"{name} cannot start here: NVIDIA's driver is missing ({reason(error)}); install it, "
            "or expose the GPU to this container"
        ) from error


def _preload_cuda(name: str) -> None:
    """Load CUDA's libraries from their Python packages. Raises BackendError.

    onnxruntime prints its failures to stdout, which must stay free for a command's JSON.
    """
    said = StringIO()
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(said):
            ort.preload_dlls()
    # Lines are "Failed to load NAME: why". Only cuBLAS is always needed; others may be missing.
    missing = [
        line.split(": ")[0].split()[-1] for line in said.getvalue().splitlines() if ": " in line
    ]
    missing = [file for file in missing if file.startswith(("lib", "cu"))]
    if any("cublas" in file for file in missing):
        raise BackendError(
            f"{name} cannot start here: {', '.join(missing)} cannot be loaded; {INSTALL_CUDA}"
        )


def _why(full: str) -> str:
    """Return why onnxruntime left a built-in provider out of a session.

    It says so only when the provider's library is registered like a plug-in.
    """
    stem = f"onnxruntime_providers_{full.removesuffix('ExecutionProvider').lower()}"
    folder = Path(ort.__file__).parent / "capi"
    for library in (folder / f"lib{stem}.so", folder / f"{stem}.dll", folder / f"lib{stem}.dylib"):
        if library.is_file():
            try:
                ort.register_execution_provider_library(full, str(library))
            except Exception as error:  # because onnxruntime's exceptions share no base class
                return reason(error)
            ort.unregister_execution_provider_library(full)
    return "onnxruntime gives no reason"
