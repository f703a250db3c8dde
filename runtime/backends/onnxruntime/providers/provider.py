"""An execution provider of onnxruntime, and the import of the module onnxruntime (`ort`).

Several packages contain this module and overwrite each other's files. If it is incomplete, importing fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stem_edge.errors import BackendError

__all__ = ["CPU", "CPU_NAME", "CUDA", "Provider", "ort"]

try:
    import onnxruntime as ort
except ImportError as error:
    raise BackendError(
        f"onnxruntime cannot be imported ({error}); install it with: pip install onnxruntime"
    ) from error
# The module is importable but empty after an uninstall that removed files of another package, too.
if not hasattr(ort, "InferenceSession"):
    raise BackendError(
        "onnxruntime is incomplete, as after uninstalling one of two packages that contain it; "
        "reinstall the one you want: pip install --force-reinstall --no-deps onnxruntime (or "
        "onnxruntime-gpu)"
    )


CPU_NAME = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True)
class Provider:
    """An available execution provider, with the arguments for opening sessions on it."""

    name: str  # onnxruntime's in lower case, without "ExecutionProvider"
    full: str  # onnxruntime's name
    devices: tuple[Any, ...] = ()  # OrtEpDevice; empty for built-in providers

    @property
    def on_cpu(self) -> bool:
        """True for onnxruntime's CPU provider, which has every operator."""
        return self.full == CPU_NAME


CPU = Provider("cpu", CPU_NAME)
