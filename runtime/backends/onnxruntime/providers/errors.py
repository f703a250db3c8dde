"""Converts onnxruntime's errors to errors of this package; imported only when there is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from stem_edge.errors import BackendError, DeviceLostError, OutOfMemoryError
from stem_edge.runtime.backends.costs import DAMAGED, LESS_MEMORY
from stem_edge.runtime.backends.onnxruntime.providers import ort

# Part of onnxruntime's message for nodes that only the CPU could run; it does not name them.
REFUSED = "fallback to CPU EP has been explicitly disabled"
MAX_REASON = 300  # characters of an engine's message
# What onnxruntime puts before its messages: an error code, a place in its sources.
_CODE = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : (?:Exception during initialization: )?"
)
_PLACE = re.compile(r"^\S+\.(?:cc|cpp|cu|h):\d+ ")
# Parts of messages of onnxruntime, CUDA and WebGPU, because these errors have no own type.
NO_MEMORY = (
    "bad_alloc",
    "allocate memory",
    "out of memory",
    "ALLOC_FAILED",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_HOST_MEMORY",
    "out_of_memory",
)
LOST = (
    "device lost",
    "device is lost",
    "DEVICE_LOST",
    "DXGI_ERROR_DEVICE_REMOVED",
    "unspecified launch failure",
)


def reason(error: Exception) -> str:
    """Return an engine's error message as one printable line, without error code and source location."""
    said = " ".join(str(error).split())
    said = _PLACE.sub("", _CODE.sub("", said)) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in said)[:MAX_REASON]


def check_lost(error: Exception, doing: str) -> None:
    """Raise DeviceLostError if `error` means that the device is gone. doing: what failed, such as "to load x"."""
    if any(words.lower() in str(error).lower() for words in LOST):
        raise DeviceLostError(
            f"the device was lost {doing} ({reason(error)}); close the model and load it again"
        ) from error


def check_device(error: Exception, doing: str) -> None:
    """Raise OutOfMemoryError or DeviceLostError if `error` means either. doing: what failed, such as "to load x"."""
    said = str(error)
    if isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY):
        raise OutOfMemoryError(
            f"no memory left {doing} ({reason(error)}); {LESS_MEMORY}"
        ) from error
    check_lost(error, doing)


def raise_error(error: Exception, doing: str) -> NoReturn:
    """Raise `error` as OutOfMemoryError, DeviceLostError or BackendError. doing: what failed ("to load x").

    An error that is not onnxruntime's own, such as that of a signal handler, is raised unchanged.
    """
    own = type(error) is RuntimeError or isinstance(error, MemoryError)
    if not own and not type(error).__module__.startswith("onnxruntime"):
        raise error
    check_device(error, doing)
    raise BackendError(f"onnxruntime failed {doing}: {reason(error)}; {DAMAGED}") from error


def raise_load_error(error: Exception, graph: object, provider: str) -> NoReturn:
    """Raise OutOfMemoryError, DeviceLostError or BackendError: loading `graph` failed. provider: "" for the CPU."""
    check_device(error, f"to load {graph}")
    who, why, advice = "", reason(error), "run stem-edge verify, or export again"
    if isinstance(graph, Path):
        advice = "delete its folder, and the next load prepares it again"
    if provider:
        who, advice = f" on {provider}", "leave out provider, to run it on the CPU"
        why = "the provider lacks operators" if REFUSED in why else why
    raise BackendError(
        f"{graph}: onnxruntime {ort.__version__} cannot load this graph{who} ({why}); {advice}"
    ) from error
