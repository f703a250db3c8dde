"""Whether a provider that is built into onnxruntime starts here: its libraries, its device.

onnxruntime lists a provider that its package was built with, whether or not the machine has what it
needs, and leaves it out of a session without an error when it does not start.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.errors import BackendError
from stem_edge.runtime.backend import check_memory, reason
from stem_edge.runtime.ort_module import ort
from stem_edge.runtime.ort_session import new_session

if TYPE_CHECKING:
    from stem_edge.runtime.providers import Provider

# y = -x, one float: the least graph that onnxruntime opens a session for.
LEAST_GRAPH = (
    b'\x08\x08:2\n\x0b\n\x01x\x12\x01y"\x03Neg\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04'
    b"\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
CUDA = "CUDAExecutionProvider"
NVIDIA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
INSTALL_CUDA = 'install CUDA\'s libraries with: pip install "onnxruntime-gpu[cuda,cudnn]"'
LOOK = "see what onnxruntime's documentation says that this provider needs"


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
