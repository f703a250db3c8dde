"""What makes an execution provider usable here: the library that brings it, its devices, its start.

A library is code: it comes from a package that is installed, or from a path that the user names;
never from a bundle. onnxruntime lists a provider that its package was built with, whether or not the
machine has what it needs, and leaves it out of a session without an error when it does not start.
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
from typing import TYPE_CHECKING, Any

from stem_edge.errors import BackendError
from stem_edge.runtime.backends.interface import check_memory, reason
from stem_edge.runtime.backends.onnxruntime.providers.ort_module import ort
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider

# What a library of some system begins with: ELF, PE, Mach-O of one and of several processors.
MAGICS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
LIBRARY_PATH = "library_path"  # onnxruntime tells a device's library in its metadata
KINDS = ("GPU", "NPU", "CPU")  # of devices, the preferred first
# y = -x, one float: the least graph that onnxruntime opens a session for.
LEAST_GRAPH = (
    b'\x08\x08:2\n\x0b\n\x01x\x12\x01y"\x03Neg\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04'
    b"\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
CUDA = "CUDAExecutionProvider"
NVIDIA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
INSTALL_CUDA = 'install CUDA\'s libraries with: pip install "onnxruntime-gpu[cuda,cudnn]"'
LOOK = "see what onnxruntime's documentation says that this provider needs"


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


def check_starts(provider: Provider) -> None:
    """Raises BackendError that says why a built-in provider does not start, OutOfMemoryError."""
    name, full, advice = provider.name, provider.full, LOOK
    if full == CUDA:
        advice = INSTALL_CUDA
        _check_driver(name)
        _preload_cuda(name)
    try:
        session = new_session(LEAST_GRAPH, 1, [provider])
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        check_memory(error, f"to start {name}")
        raise BackendError(f"{name} cannot start here ({reason(error)}); {advice}") from error
    if full not in session.get_providers():
        raise BackendError(f"{name} cannot start here: {_why(full)}; {advice}")


def _check_driver(name: str) -> None:
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError as error:
        raise BackendError(
            f"{name} cannot start here: NVIDIA's driver is not there ({reason(error)}); install it, or "
            "show the GPU to this container"
        ) from error


def _preload_cuda(name: str) -> None:
    """Load CUDA's libraries from the packages they come in. Raises BackendError.

    onnxruntime prints what it could not load, where a command may be printing JSON.
    """
    said = StringIO()
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(said):
            ort.preload_dlls()
    # "Failed to load NAME: why". What is lacking may not be needed, but for this one.
    missing = [
        line.split(": ")[0].split()[-1] for line in said.getvalue().splitlines() if ": " in line
    ]
    missing = [file for file in missing if file.startswith(("lib", "cu"))]
    if any("cublas" in file for file in missing):
        raise BackendError(
            f"{name} cannot start here: {', '.join(missing)} cannot be loaded; {INSTALL_CUDA}"
        )


def _why(full: str) -> str:
    """Why onnxruntime left a built-in provider out: it raises that where plug-ins are registered."""
    stem = f"onnxruntime_providers_{full.removesuffix('ExecutionProvider').lower()}"
    folder = Path(ort.__file__).parent / "capi"
    for library in (folder / f"lib{stem}.so", folder / f"{stem}.dll", folder / f"lib{stem}.dylib"):
        if library.is_file():
            try:
                ort.register_execution_provider_library(full, str(library))
            except Exception as error:  # as above
                return reason(error)
            ort.unregister_execution_provider_library(full)
    return "onnxruntime does not say why"
