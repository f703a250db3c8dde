"""Torch distributed checkpoints: an archive of torch.save for each piece of each tensor, end to end in
`__*.distcp`, and `.metadata`, an index that is a bare pickle and read as data like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from stem_edge import disk
from stem_edge.errors import CheckpointError
from stem_edge.export.settings import one_line
from stem_edge.export.stored import SourceFile, StoredTensor, check_shape, check_type
from stem_edge.export.torch_files import (
    CONSTANT,
    describe,
    empty,
    first_of,
    guarded,
    read_archive,
)
from stem_edge.export.torch_pickle import Made, read_pickle
from stem_edge.quantize import F32

MAX_METADATA_NBYTES = 1 << 28
_CHECKPOINT = "torch.distributed.checkpoint."
_INDEX_NAMES = frozenset(
    {
        "torch.Size",
        "collections.OrderedDict",
        "builtins.getattr",  # how some Python versions pickle an enum's member
        "torch.serialization._get_layout",
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "WindowsPath")),
        "pathlib._local.PosixPath",
        f"{_CHECKPOINT}filesystem._StorageInfo",
    }
).union(
    f"{_CHECKPOINT}metadata.{name}"
    for name in (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        "TensorProperties._MEM_FORMAT_ENCODING",
    )
)
T = TypeVar("T")


class Chunk(NamedTuple):
    """Some rows of a tensor: the first of them, and their values."""

    start: int
    tensor: StoredTensor


class DistributedMatrix:
    """A Matrix over one tensor of a distributed checkpoint, in chunks along its first axis."""

    def __init__(self, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        self.shape, self._chunks = shape, chunks
        self.nbytes = sum(chunk.tensor.nbytes for chunk in chunks)

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32."""
        pieces = []
        for at, tensor in self._chunks:
            first, last = max(start - at, 0), min(stop - at, tensor.shape[0])
            if first < last:
                pieces.append(tensor.rows(first, last))
        return np.concatenate(pieces) if pieces else np.empty((0, *self.shape[1:]), np.float32)


def load_distributed(folder: Path) -> dict[str, DistributedMatrix]:
    """Name -> matrix of every tensor under `model.` in a torch distributed checkpoint."""
    path = folder / ".metadata"
    metadata = guarded(path, lambda: _read_metadata(path))
    return guarded(path, lambda: _matrices(folder, metadata))


class _Place(msgspec.Struct):
    """Where the chunk of a tensor lies."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


class _Piece(msgspec.Struct):
    """Which part of a tensor a chunk is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Entry(msgspec.Struct):
    """A tensor of the index."""

    size: tuple[int, ...]
    chunks: list[Any]


class _Index(msgspec.Struct):
    """Which chunk of which tensor."""

    fqn: str
    offset: tuple[int, ...] | None = None


class _Metadata(msgspec.Struct):
    """The index of a distributed checkpoint."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


def _path(*parts: str) -> str:
    return "/".join(parts)


def _read_metadata(path: Path) -> Any:
    data = disk.read_file(path.resolve(), MAX_METADATA_NBYTES)
    if len(data) > MAX_METADATA_NBYTES:
        raise ValueError(f"larger than {MAX_METADATA_NBYTES} bytes")
    makers: dict[str, Callable[..., Any]] = {
        "torch.Size": first_of,
        "collections.OrderedDict": empty,
        **{name: _path for name in _INDEX_NAMES if name.startswith("pathlib")},
    }
    return read_pickle(
        data,
        lambda name: name in _INDEX_NAMES or bool(CONSTANT.fullmatch(name)),
        makers,
        _no_storage,
    )


def _no_storage(described: Any) -> Any:
    raise ValueError("values in the index of a checkpoint")


def _as(made: Any, type: type[T]) -> T:
    """What was set of something made. Raises TypeError, ValueError."""
    state = made.state if isinstance(made, Made) else None
    if not isinstance(state, dict):
        raise TypeError(f"{describe(made)} in the place of {type.__name__.strip('_').lower()}")
    return msgspec.convert(state, type)


def _matrices(folder: Path, found: Any) -> dict[str, DistributedMatrix]:
    metadata = _as(found, _Metadata)
    places = {}
    for key, place in metadata.storage_data.items():
        index = _as(key, _Index)
        places[index.fqn, index.offset or ()] = place
    matrices, files = {}, dict[Path, SourceFile]()
    for key, made in metadata.state_dict_metadata.items():
        if not key.startswith("model.") or "chunks" not in (getattr(made, "state", None) or ()):
            continue
        entry = _as(made, _Entry)
        shape = check_shape(key, entry.size)
        pieces = [_as(piece, _Piece) for piece in entry.chunks]
        chunks = [_chunk(folder, key, places, piece, files) for piece in pieces]
        chunks.sort(key=lambda chunk: chunk.start)
        _check_chunks(folder, key, shape, chunks)
        matrices[key.removeprefix("model.")] = DistributedMatrix(shape, chunks)
    return matrices


def _check_chunks(folder: Path, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    at = 0
    for start, tensor in chunks:
        if start != at or tensor.shape[1:] != shape[1:]:
            raise CheckpointError(
                f"{tensor.path}: tensor {one_line(name)} is cut other than along its rows; "
                "consolidate the checkpoint with the trainer's own tool first"
            )
        at += tensor.shape[0]
    if not shape or at != shape[0]:
        raise CheckpointError(
            f"{folder}: {one_line(name)}: the distributed checkpoint has {at} of {sum(shape[:1])} rows; "
            "a file of another rank is missing: copy the whole folder"
        )


def _chunk(
    folder: Path, key: str, places: dict[Any, Any], piece: _Piece, files: dict[Path, SourceFile]
) -> Chunk:
    name = one_line(key)
    if (key, piece.offsets) not in places:
        raise ValueError(f"tensor {name} lies nowhere")
    place = _as(places[key, piece.offsets], _Place)
    path = folder / place.relative_path
    if Path(place.relative_path).name != place.relative_path or "\\" in place.relative_path:
        raise ValueError(f"tensor {name} lies in {place.relative_path!r}, outside of the folder")
    if place.transform_descriptors:
        raise ValueError(f"tensor {name} is stored compressed; save it without extensions")
    if path not in files:
        files[path] = SourceFile(path)
    end = place.offset + place.length
    if min(place.offset, place.length) < 0 or end > files[path].nbytes:
        raise CheckpointError(
            f"{path}: {files[path].nbytes} bytes found, tensor {name} needs {end}; the file is cut: "
            "copy it again"
        )
    tensor = guarded(path, lambda: read_archive(files[path], place.offset, place.length))
    if not isinstance(tensor, StoredTensor) or tensor.shape != piece.sizes or not piece.sizes:
        raise CheckpointError(
            f"{path}: found {describe(tensor)} at byte {place.offset}, expected a tensor "
            f"{list(piece.sizes)}; the checkpoint is damaged: copy it again"
        )
    if any(piece.offsets[1:]):
        raise CheckpointError(
            f"{path}: tensor {name} is cut other than along its rows; consolidate the checkpoint "
            "with the trainer's own tool first"
        )
    return Chunk(piece.offsets[0], check_type(tensor.named(name)))
