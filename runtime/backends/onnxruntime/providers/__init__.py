"""Sessions of onnxruntime on the CPU or on an execution provider; `ort` is the module onnxruntime.

Several PyPI packages contain this module and overwrite each other's files. If files are missing, importing fails.
"""

from __future__ import annotations

from stem_edge.errors import BackendError

__all__ = ["ort"]

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
