"""Tensors in files of torch.save: torch opens them without values, which are then read in place.

`weights_only` keeps torch from running anything in such a file. With `map_location="meta"` it reads
no values, but notes where those of each tensor begin.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line, reason_of
from stem_edge.export.tensor_files.source_file import (
    HEAD_NBYTES,
    ZIP,
    Checksum,
    SourceFile,
    looks_like,
)
from stem_edge.export.tensor_files.tensor import (
    VALUE_NBYTES,
    Tensor,
    check_type,
    extent,
    file_tensor,
)

OLDEST = (2, 10)  # a pickle could run code in earlier releases, in spite of weights_only
DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int32": "I32",
    "int64": "I64", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
# Calls that a state of numpy's random numbers makes, which is in files of BlaGPT's trainer.
ARRAYS = (
    *("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
    *("numpy.ndarray", "numpy.dtype"),
)
LOCAL = struct.Struct("<4s22x2H")  # a member's local header: magic, lengths of name and extra field
# Prefixes that wrappers of a model put before its names.
WRAPPERS = re.compile(r"\b(lm_transformer|module|_orig_mod|_checkpoint_wrapped_module)\.")
T = TypeVar("T")


class Unread:
    """Stands for an object of any class, and has its attributes."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def load_tensors(path: Path) -> dict[Any, Any]:
    """Open a dict saved by torch.save, with a Tensor for each tensor, not read yet."""
    file = SourceFile(path)
    state = guarded(path, lambda: read_archive(file, 0, file.nbytes))
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: holds a {type(state).__name__}; expected a dict of tensors: give another file"
        )
    return state


def named_tensors(path: Path, state: Any, skipped: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return the matrices and vectors of a model's state, by names without wrappers' prefixes.

    skipped: prefixes of names to be left out. Raises CheckpointError.
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
        tensors[name] = check_type(tensor.named(one_line(name)))
    return tensors


def guarded(path: Path, read: Callable[[], T]) -> T:
    """Run a reader; any error of a damaged or hostile file becomes a CheckpointError of one line."""
    try:
        return read()
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; copy the whole checkpoint folder") from error
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


def read_archive(file: SourceFile, start: int, nbytes: int) -> Any:
    """Open what one torch.save wrote into these bytes of a file. Raises whatever torch does."""
    torch = _import_torch(file.path)
    head = file.read(start, min(HEAD_NBYTES, nbytes))
    if not head.startswith(ZIP):
        what = looks_like(head) or f"bytes {head[:8].hex(' ') or 'none'}"
        raise ValueError(f"it is {what}, not an archive of torch.save")
    part = _FilePart(file, start, nbytes)
    records = _records(part)
    part.seek(0)
    with torch.serialization.safe_globals([(Unread, name) for name in ARRAYS]):
        state = torch.load(part, map_location="meta", weights_only=True)

    def opened(value: Any, depth: int = 2) -> Any:  # of a model in a trainer's state
        if isinstance(value, dict) and depth:
            return {key: opened(inner, depth - 1) for key, inner in value.items()}
        return _stored(value, file, records) if isinstance(value, torch.Tensor) else value

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


class _FilePart(io.RawIOBase):
    """Bytes of a file as a file of their own."""

    def __init__(self, file: SourceFile, start: int, nbytes: int) -> None:
        self.file, self.start, self.nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.nbytes)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.nbytes - self._at))
        buffer[:count] = self.file.read(self.start + self._at, count)
        self._at += count
        return count


def _records(part: _FilePart) -> dict[int, Checksum]:
    """Map byte of the archive -> record that begins there. Raises ValueError, BadZipFile."""
    records = {}
    with zipfile.ZipFile(part) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed, which torch.save never does")
            small = member.filename.endswith(("/data.pkl", "/byteorder"))
            data = archive.read(member) if small else b""  # which compares its checksum
            if data == b"big":
                raise ValueError("its values are not little-endian; save it on another machine")
            part.seek(member.header_offset)
            magic, *lengths = LOCAL.unpack(part.read(LOCAL.size) or b"")
            at = member.header_offset + LOCAL.size + sum(lengths)
            if magic != ZIP or at + member.file_size > part.nbytes:
                raise ValueError(f"{member.filename} is not where its directory says")
            records[at] = Checksum(part.file, part.start + at, member.file_size, member.CRC)
    return records


def _stored(tensor: Any, file: SourceFile, records: dict[int, Checksum]) -> Any:
    """Return where a tensor's values lie; a tensor of an unknown kind as it is."""
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or str(tensor.layout) != "torch.strided":
        return tensor
    record = records.get(tensor.untyped_storage()._checkpoint_offset)
    shape, strides, first = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    count = max(first + extent(shape, strides), tensor.numel())
    if record is None or count * VALUE_NBYTES[dtype] > record.nbytes:
        raise ValueError(f"a tensor {list(shape)} is larger than its values")
    at = record.at + first * VALUE_NBYTES[dtype]
    return file_tensor(file, f"at byte {at}", dtype, shape, at, strides, record)
