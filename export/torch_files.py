"""Tensors out of files that torch wrote, without ever running code that they carry.

Only `torch.load(weights_only=True)` reads tensors. The index of a torch distributed checkpoint
(`.metadata`) is a bare pickle that torch itself reads without restriction; here an unpickler that
knows some twenty names, all bound to inert stand-ins, reads it instead.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from stem_edge.errors import CheckpointError
from stem_edge.quantize import F32

MAX_METADATA_NBYTES = 1 << 28
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorMatrix:
    """A Matrix over tensors that lie side by side: the column shards of one table."""

    def __init__(self, shards: Sequence[torch.Tensor]) -> None:
        self._shards = list(shards)
        columns = sum(shard.shape[1] for shard in shards) if shards[0].ndim == 2 else None
        rows = int(shards[0].shape[0])
        self.shape: tuple[int, ...] = (rows,) if columns is None else (rows, columns)
        self.nbytes = sum(shard.nbytes for shard in shards)

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop of all columns as float32."""
        pieces = [shard[start:stop].to(torch.float32) for shard in self._shards]
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return cast(F32, joined.detach().numpy())


class DistributedMatrix:
    """A Matrix over one tensor of a distributed checkpoint, in chunks along its first axis."""

    def __init__(
        self, name: str, shape: tuple[int, ...], chunks: list[_Chunk], latest: _Latest
    ) -> None:
        self.shape = shape
        self._name, self._chunks = name, sorted(chunks, key=lambda chunk: chunk.offsets)
        self._latest = latest
        self.nbytes = sum(chunk.nbytes for chunk in chunks)
        self._check()

    def _check(self) -> None:
        at = 0
        for chunk in self._chunks:
            tail = (0,) * (len(self.shape) - 1)
            if chunk.offsets != (at, *tail) or chunk.sizes[1:] != self.shape[1:]:
                raise CheckpointError(
                    f"{chunk.path}: tensor {self._name} is cut other than along its rows; "
                    "consolidate the checkpoint with the trainer's own tool first"
                )
            at += chunk.sizes[0]
        if at != self.shape[0]:
            raise CheckpointError(
                f"{self._name}: the distributed checkpoint has {at} of {self.shape[0]} rows; "
                "a file of another rank is missing: copy the whole folder"
            )

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32."""
        pieces = []
        for chunk in self._chunks:
            at = chunk.offsets[0]
            first, last = max(start - at, 0), min(stop - at, chunk.sizes[0])
            if first < last:
                pieces.append(self._latest.load(chunk)[first:last].to(torch.float32))
        if stop == self.shape[0]:
            self._latest.drop()
        return cast(F32, torch.cat(pieces).detach().numpy())


class _Latest:
    """The chunk that was read last, of a whole checkpoint: rows are asked for in order, by several
    threads, and a chunk can be half a gigabyte."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: _Chunk | None = None
        self._tensor = torch.empty(0)

    def load(self, chunk: _Chunk) -> torch.Tensor:
        with self._lock:
            if self._chunk is not chunk:
                self._chunk, self._tensor = None, torch.empty(0)  # the old one goes first
                self._tensor = chunk.load()
                self._chunk = chunk
            return self._tensor

    def drop(self) -> None:
        """Let go of it: its last rows were read."""
        with self._lock:
            self._chunk, self._tensor = None, torch.empty(0)


class _Chunk:
    """One stored piece of a tensor: where it lies and which part it is."""

    def __init__(
        self,
        path: Path,
        span: tuple[int, int],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        self.path, self._span, self.offsets, self.sizes = path, span, offsets, sizes
        self.nbytes = span[1]

    def load(self) -> torch.Tensor:
        with self.path.open("rb") as file:
            window = io.BufferedReader(_Window(file, *self._span))
            tensor = _guarded(self.path, lambda: torch.load(window, "cpu", weights_only=True))
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.sizes:
            raise CheckpointError(
                f"{self.path}: found {_describe(tensor)} at byte {self._span[0]}, expected a "
                f"tensor {list(self.sizes)}; the checkpoint is damaged: copy it again"
            )
        return check_float(self.path, "chunk", tensor)


class _Window(io.RawIOBase):
    """A span of a file as a file of its own: torch saves one archive a tensor, end to end."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


def load_tensors(path: Path) -> dict[str, Any]:
    """A dict saved by torch.save, its tensors mapped from the file and not read yet."""
    state = _guarded(
        path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    )
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds {_describe(state)}, expected a dict of tensors")
    return state


def load_distributed(folder: Path) -> dict[str, DistributedMatrix]:
    """Name -> matrix of every tensor under `model.` in a torch distributed checkpoint."""
    path = folder / ".metadata"
    metadata = _guarded(path, lambda: _read_metadata(path))
    matrices: dict[str, DistributedMatrix] = _guarded(path, lambda: _matrices(folder, metadata))
    return matrices


def check_float(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if its type is one that can be exported."""
    if tensor.dtype not in FLOATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise CheckpointError(f"{path}: {name} is {tensor.dtype}; expected one of {known}")
    return tensor


def _guarded(path: Path, read: Any) -> Any:
    """Run a reader; whatever a damaged or hostile file makes it raise becomes one line."""
    try:
        return read()
    except (CheckpointError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; copy the whole checkpoint folder") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read ({error.strerror or error})") from error
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")[:160]
        raise CheckpointError(
            f"{path}: not readable as plain tensors ({reason}); the file is cut, damaged or "
            "carries code: copy it again from where it was trained"
        ) from error


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    return f"a {type(value).__name__}"


class _Inert:
    """Stands in for a class of torch.distributed.checkpoint: keeps what the pickle says of it."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _inert_path(*parts: str) -> str:
    return "/".join(parts)


_CHECKPOINT = "torch.distributed.checkpoint."
# The whole vocabulary of a `.metadata` file; any other name is refused.
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _Inert,  # how some Python versions pickle an enum's member
    ("torch.serialization", "_get_layout"): _Inert,
    ("pathlib", "Path"): _inert_path,
    ("pathlib", "PosixPath"): _inert_path,
    ("pathlib", "WindowsPath"): _inert_path,
    ("pathlib._local", "PosixPath"): _inert_path,
    (_CHECKPOINT + "filesystem", "_StorageInfo"): _Inert,
    **{
        (_CHECKPOINT + "metadata", name): _Inert
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
            "TensorProperties._MEM_FORMAT_ENCODING",
        )
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), CONSTANTS):
            return name
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint index needs"
            ) from None


def _read_metadata(path: Path) -> _Inert:
    with path.open("rb") as file:
        if path.stat().st_size > MAX_METADATA_NBYTES:
            raise ValueError(f"larger than {MAX_METADATA_NBYTES} bytes")
        return cast(_Inert, _MetadataUnpickler(file).load())


def _matrices(folder: Path, metadata: Any) -> dict[str, DistributedMatrix]:
    places = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info
        for index, info in metadata.storage_data.items()
    }
    matrices, latest = {}, _Latest()
    for key, entry in metadata.state_dict_metadata.items():
        if not key.startswith("model.") or not hasattr(entry, "chunks"):
            continue
        chunks = [_chunk(folder, key, places, piece) for piece in entry.chunks]
        matrices[key.removeprefix("model.")] = DistributedMatrix(
            key, tuple(entry.size), chunks, latest
        )
    return matrices


def _chunk(folder: Path, key: str, places: dict[Any, Any], piece: Any) -> _Chunk:
    offsets, sizes = tuple(piece.offsets), tuple(piece.sizes)
    info = places[key, offsets]
    path = folder / info.relative_path
    if Path(info.relative_path).name != info.relative_path:
        raise ValueError(f"tensor {key} lies in {info.relative_path!r}, outside of the folder")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"tensor {key} is stored compressed; save it without extensions")
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, tensor {key} lies in it; copy the whole folder")
    if info.offset < 0 or info.offset + info.length > path.stat().st_size:
        raise CheckpointError(
            f"{path}: {path.stat().st_size} bytes found, tensor {key} needs "
            f"{info.offset + info.length}; the file is cut: copy it again"
        )
    return _Chunk(path, (info.offset, info.length), offsets, sizes)
