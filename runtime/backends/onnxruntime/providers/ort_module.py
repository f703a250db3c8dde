"""onnxruntime, or one clear error: several packages bring a module of this name, one over another."""

from __future__ import annotations

from stem_edge.errors import BackendError

__all__ = ["ort"]

try:
    import onnxruntime as ort
except ImportError as error:
    raise BackendError(
        f"onnxruntime cannot be imported ({error}); install it with: pip install onnxruntime"
    ) from error
# Uninstalling one of the packages takes the files of the other, too.
if not hasattr(ort, "InferenceSession"):
    raise BackendError(
        "onnxruntime is incomplete, as it is after one of two packages of it was uninstalled; install "
        "the one you want again: pip install --force-reinstall --no-deps onnxruntime (or "
        "onnxruntime-gpu)"
    )
