"""Opens tensors in files of torch.save. torch maps these files into memory.

`weights_only` keeps torch from running code in a file. All checksums of the archive are compared before
it is mapped, because reading a truncated mapped file would end the process.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line, reason_of
from stem_edge.export.tensor_files.source_file import CHANGED, HEAD_NBYTES, ZIP, looks_like
from stem_edge.export.tensor_files.tensor import Tensor, check_type
from stem_edge.numerics.quantize import F32

OLDEST = (2, 10)  # a pickle could run code in earlier releases, in spite of weights_only
DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int32": "I32",
    "int64": "I64", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
# Classes in the state of numpy's random generator, which BlaGPT's trainer saves.
ARRAYS = (
    *("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
    *("numpy.ndarray", "numpy.dtype"),
)
# Prefixes that wrappers of a model put before its names.
WRAPPERS = re.compile(r"\b(lm_transformer|module|_orig_mod|_checkpoint_wrapped_module)\.")
PIECE_NBYTES = 1 << 22  # read at a time to compare checksums


class Unread:
    """Placeholder for a pickled object of any class; ignores the object's state."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load_tensors(path: Path) -> dict[Any, Any]:
    """Open a dict saved by torch.save, with a lazy Tensor in the place of each torch tensor.

    Any error from a damaged or hostile file becomes a CheckpointError of one line.
    """
    try:
        _check_archive(path)
        state = _mapped(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot read ({error.strerror or error}); check the disk, or copy it again"
        ) from error
    except Exception as error:  # torch raises errors of many types for a damaged file
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {code[1]}, which no tensor needs" if code else reason_of(error)
        raise CheckpointError(
            f"{path}: not readable as plain tensors ({reason}); the file is truncated, damaged or "
            "carries code: copy it again from where it was trained, or save the model as "
            "safetensors there"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: holds a {type(state).__name__}; expected a dict of tensors: give another file"
        )
    return state


def named_tensors(path: Path, state: Any, skipped: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return name -> tensor of a state dict `state`, without prefixes such as "module." in names.

    skipped: prefixes of names to leave out. Raises CheckpointError for values that are not tensors.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}; expected a dict of tensors")
    tensors: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = WRAPPERS.sub("", str(key))
        if name.startswith(skipped):
            continue
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{path}: {one_line(key)} is a {type(tensor).__name__} without plain values; "
                "expected a tensor"
            )
        if len(tensor.shape) not in (1, 2) or name in tensors:
            raise CheckpointError(
                f"{path}: {one_line(key)} is {list(tensor.shape)}; expected each matrix and vector "
                "once: check that the file is of this model"
            )
        tensors[name] = check_type(replace(tensor, name=one_line(name)))
    return tensors


def _check_archive(path: Path) -> None:
    """Raise ValueError or BadZipFile unless the file is a complete archive of torch.save."""
    with path.open("rb") as file:
        head = file.read(HEAD_NBYTES)
        if not head.startswith(ZIP):
            what = looks_like(head) or f"bytes {head[:8].hex(' ')}"
            raise ValueError(f"it is {what}, not an archive of torch.save")
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(
                        f"{member.filename} is compressed, which torch.save never does"
                    )
                with archive.open(member) as data:  # compares the checksum when all is read
                    while member.CRC and data.read(PIECE_NBYTES):  # 0: torch did not compute it
                        pass


def _mapped(path: Path) -> Any:
    """Load a file of torch.save; map its tensors into memory. Raises any error of torch."""
    torch = _import_torch(path)
    with torch.serialization.safe_globals([(Unread, name) for name in ARRAYS]):
        state = torch.load(path.resolve(), weights_only=True, mmap=True)

    def opened(value: Any, depth: int = 2) -> Any:  # depth 2: a model inside a trainer's state
        if isinstance(value, dict) and depth:
            return {key: opened(inner, depth - 1) for key, inner in value.items()}
        return _opened(path, value) if isinstance(value, torch.Tensor) else value

    return opened(state)


def _import_torch(path: Path) -> Any:
    """Import torch. Raises CheckpointError if it is missing or too old to be safe."""
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise CheckpointError(
            f"{path}: needs torch, which cannot be imported ({error}); pip install "
            "'stem-edge[torch]', or save the model as safetensors where it was trained"
        ) from error
    version = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise CheckpointError(
            f"{path}: torch is {torch.__version__}; expected {'.'.join(map(str, OLDEST))} or newer, "
            "because a checkpoint could run code in earlier releases: pip install -U torch"
        )
    return torch


def _opened(path: Path, tensor: Any) -> Any:
    """Return a torch tensor as a lazy Tensor; unchanged if its dtype is not supported."""
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or str(tensor.layout) != "torch.strided":
        return tensor
    shape = tuple(tensor.shape)
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor {list(shape)} is larger than its values")
    values, written = tensor.detach() if shape else tensor.detach()[None], path.stat().st_mtime_ns

    def rows(start: int, stop: int) -> F32:
        if path.stat().st_mtime_ns != written:
            raise CheckpointError(f"{path}: {CHANGED}")
        found: F32 = np.array(values[start:stop].float().numpy())  # callers may change the copy
        return found

    return Tensor(shape, rows, path=path, dtype=dtype)
