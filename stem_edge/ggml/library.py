"""ctypes bindings for the ggml functions that this project calls, in known versions of ggml.

The shared libraries are those of llama-cpp-python, whose Python code is not imported. Structs are
opaque pointers. ggml aborts the process on wrong arguments, so callers check sizes and types.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from stem_edge.errors import BackendError
from stem_edge.ggml.installed import AGAIN, FOLDERS, REINSTALL

# Version of ggml whose headers were compared with PROTOTYPES -> release that contains it.
KNOWN_VERSIONS = {"0.25.3": "llama-cpp-python 0.3.36"}
# Windows resolves a function only in the library that defines it. On other systems, these
# libraries must not be opened, because that would map ggml-base a second time, with its own state.
WINDOWS_PARTS = ("ggml-base.dll", "ggml-cpu.dll")

P, SIZE, INT, I64, F = c_void_p, c_size_t, c_int, c_int64, c_float


class InitParams(ctypes.Structure):
    """C struct ggml_init_params: memory in which ggml allocates the descriptions of tensors."""

    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", c_bool)]


# name without ggml_ -> type of the result, types of the arguments
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "init": (P, [InitParams]),
    "free": (None, [P]),
    "log_set": (None, [P, P]),
    "tensor_overhead": (SIZE, []),
    "graph_overhead_custom": (SIZE, [SIZE, c_bool]),
    "nbytes": (SIZE, [P]),
    "nelements": (I64, [P]),
    # tensors: context, type, sizes; views: context, tensor, sizes, strides and offset in bytes
    "new_tensor_1d": (P, [P, INT, I64]),
    "new_tensor_2d": (P, [P, INT, I64, I64]),
    "new_tensor_3d": (P, [P, INT, I64, I64, I64]),
    "view_1d": (P, [P, P, I64, SIZE]),
    "view_2d": (P, [P, P, I64, I64, SIZE, SIZE]),
    "view_3d": (P, [P, P, I64, I64, I64, SIZE, SIZE, SIZE]),
    "reshape_2d": (P, [P, P, I64, I64]),
    "reshape_3d": (P, [P, P, I64, I64, I64]),
    "permute": (P, [P, P, INT, INT, INT, INT]),
    "cont": (P, [P, P]),
    "concat": (P, [P, P, P, INT]),
    "cpy": (P, [P, P, P]),
    # operators: context, operands, parameters
    "get_rows": (P, [P, P, P]),
    "set_rows": (P, [P, P, P, P]),
    "mul_mat": (P, [P, P, P]),
    "mul_mat_id": (P, [P, P, P, P]),
    "add": (P, [P, P, P]),
    "mul": (P, [P, P, P]),
    "div": (P, [P, P, P]),
    "sqr": (P, [P, P]),
    "scale": (P, [P, P, F]),
    "scale_bias": (P, [P, P, F, F]),
    "swiglu_split": (P, [P, P, P]),
    "rms_norm": (P, [P, P, F]),
    "soft_max": (P, [P, P]),
    "rope_ext": (P, [P, P, P, P, INT, INT, INT, F, F, F, F, F, F]),
    "flash_attn_ext": (P, [P, P, P, P, P, F, F, F]),
    "set_input": (None, [P]),
    "new_graph_custom": (P, [P, SIZE, c_bool]),
    "build_forward_expand": (None, [P, P]),
    "gallocr_new": (P, [P]),
    "gallocr_free": (None, [P]),
    "gallocr_reserve": (c_bool, [P, P]),
    "gallocr_alloc_graph": (c_bool, [P, P]),
    "gallocr_get_buffer_size": (SIZE, [P, INT]),
    # the processor, and memory for tensors
    "backend_cpu_init": (P, []),
    "backend_cpu_set_n_threads": (None, [P, INT]),
    "backend_free": (None, [P]),
    "backend_graph_compute": (INT, [P, P]),
    "backend_cpu_buffer_type": (P, []),
    "backend_cpu_buffer_from_ptr": (P, [P, SIZE]),
    "backend_buffer_free": (None, [P]),
    "backend_tensor_alloc": (INT, [P, P, P]),
    "backend_tensor_set": (None, [P, P, SIZE, SIZE]),
    # quantizing: type, values, result, first value, rows, values per row, weights of channels
    "quantize_init": (None, [INT]),
    "quantize_chunk": (SIZE, [INT, P, P, I64, I64, I64, P]),
}
SUCCESS = 0
ROPE_PAIRS, ROPE_HALVES = 0, 2  # GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX


# Log callback, because ggml may write to stderr. Global, because ggml keeps the pointer.
_quiet = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda level, text, data: None)


class Ggml:
    """Loaded ggml library. `library.mul_mat(context, a, b)` calls `ggml_mul_mat`."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises BackendError if loading fails, or its version is not known."""
        try:
            handles = _open(path)
        except OSError as error:
            raise BackendError(f"{path}: cannot be loaded ({error}); {AGAIN}") from error
        version = _function(path, handles, "version", c_char_p, [])
        self.path = path
        self.version = (version() or b"").decode(errors="replace")
        if self.version not in KNOWN_VERSIONS:
            known = ", ".join(f"{n} ({release})" for n, release in KNOWN_VERSIONS.items())
            raise BackendError(
                f"{path}: ggml {self.version} is not supported by this stem-edge; expected "
                f"{known}; install it with: {REINSTALL}"
            )
        for name, (result, arguments) in PROTOTYPES.items():
            setattr(self, name, _function(path, handles, name, result, arguments))
        self.log_set(_quiet, None)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. Exists for type checkers, which cannot see what __init__ sets."""
        raise AttributeError(f"ggml_{name} is not in PROTOTYPES")


def _open(path: Path) -> list[ctypes.CDLL]:
    """Open ggml's libraries; return handles, in order of function lookup. Raises OSError."""
    if sys.platform != "win32":
        return [ctypes.CDLL(str(path))]
    for folder in FOLDERS:
        beside = path.parent.parent.resolve() / folder
        if beside.is_dir():
            os.add_dll_directory(str(beside))  # it may hold libraries that libggml loads
    parts = [path.with_name(name) for name in WINDOWS_PARTS]
    return [ctypes.CDLL(str(part)) for part in (path, *parts) if part == path or part.is_file()]


def _function(
    path: Path, handles: list[ctypes.CDLL], name: str, result_type: Any, argument_types: list[Any]
) -> Any:
    """Look up `ggml_<name>` in the libraries `handles`. Raises BackendError if it is missing."""
    for handle in handles:
        function = getattr(handle, "ggml_" + name, None)
        if function is not None:
            function.restype, function.argtypes = result_type, argument_types
            return function
    raise BackendError(f"{path}: has no function ggml_{name}, so ggml is incomplete; {AGAIN}")
