"""Finds the execution provider for the option `provider`, in onnxruntime or in a plug-in's package.

A plug-in's library is code, so it comes only from an installed package, never from a bundle.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

from stem_edge.errors import BackendError, InputError
from stem_edge.runtime.backends.onnxruntime.providers import ort
from stem_edge.runtime.backends.onnxruntime.providers.errors import reason
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, CUDA, Provider

SUFFIX = "executionprovider"
PLUG_IN = "onnxruntime_ep_"  # begins the name of a package with a plug-in
KINDS = ("GPU", "NPU", "CPU")  # of devices, the preferred one first
ELSEWHERE = "azure"  # never offered, because it sends the work to other machines
INSTALL = {
    "cuda": 'pip install "stem-edge[cuda]" && pip install --force-reinstall --no-deps onnxruntime-gpu',
    "webgpu": 'pip install "stem-edge[webgpu]"',
    "coreml": "it is in onnxruntime's package for macOS, and only there",
}


def find_provider(name: str) -> Provider:
    """Return onnxruntime's provider `name`, in upper or lower case; "ExecutionProvider" may be omitted.

    Raises InputError for an empty name, BackendError if the provider is not installed or has no device.
    """
    short = _short(name)
    if not short:
        raise InputError(
            "provider is empty; expected a name like cuda, or leave it out for the CPU"
        )
    if short == CPU.name:
        return CPU
    if found := _plugged(short):
        return Provider(short, str(found[0].ep_name), tuple(found[:1]))
    built_in = {_short(full): str(full) for full in ort.get_available_providers()}
    built_in.pop(ELSEWHERE, None)
    if short not in built_in:
        advice = INSTALL.get(short, "expected one of these, cuda, webgpu or coreml")
        raise BackendError(
            f"provider is {name!r}, but onnxruntime {ort.__version__} has only "
            f"{', '.join(built_in)} here; {advice}"
        )
    if built_in[short] == CUDA:
        with redirect_stdout(StringIO()):  # because stdout may be a command's JSON
            ort.preload_dlls()  # CUDA's libraries in Python packages
    return Provider(short, built_in[short])


def _short(name: str) -> str:
    return name.strip().lower().removesuffix(SUFFIX)


def _plugged(short: str) -> list[Any]:
    """Return a plug-in's devices (OrtEpDevice), the preferred one first; [] if no such plug-in is installed.

    short: the provider's name, such as "webgpu". Raises BackendError.
    """
    found, module = _devices(short), PLUG_IN + short
    if found or find_spec(module) is None:
        return found
    try:
        library = str(import_module(module).get_library_path())
        ort.register_execution_provider_library(short, library)
    except Exception as error:  # because importing it runs foreign code
        raise BackendError(
            f"the package {module} is installed, but onnxruntime {ort.__version__} cannot use its "
            f"library ({reason(error)}); install it again"
        ) from error
    if not (found := _devices(short)):
        raise BackendError(
            f"{short} finds no device here that it can use; install the device's driver, and expose "
            "the device to this container (on Linux also /sys/class/drm)"
        )
    return found


def _devices(short: str) -> list[Any]:
    found = [one for one in ort.get_ep_devices() if _short(one.ep_name) == short]
    return sorted(found, key=lambda one: KINDS.index(str(one.device.type.name)))
