"""Torch distributed checkpoints: `__*.distcp` files, and `.metadata`, their index.

The files hold an archive of torch.save for each piece of each tensor, end to end. The index is a bare
pickle, which torch itself would run. Here every name in it stands for `Unread`, so nothing is run, and
what has other attributes than torch gives it is refused as damaged.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.source_file import SourceFile
from stem_edge.export.tensor_files.tensor import Tensor, check_shape, check_type, joined
from stem_edge.export.tensor_files.torch import Unread, check_archive, guarded, read_archive
from stem_edge.files import disk
from stem_edge.numerics.quantize import F32

MAX_METADATA_NBYTES = 1 << 28
Values: TypeAlias = Callable[[SourceFile, int, int], Tensor]  # those in a part of a file


def load_distributed(folder: Path) -> dict[str, Tensor]:
    """Open the tensors under `model.` of a distributed checkpoint, as name -> matrix."""
    path = folder / ".metadata"
    return guarded(path, lambda: _matrices(folder, _read_metadata(path)))


class _Reader(pickle._Unpickler):
    """Reader of a pickle that looks no name up. In Python, because the one in C trusts sizes."""

    def find_class(self, module: str, name: str) -> Any:
        plain: dict[str, Any] = {"torch.Size": tuple, "collections.OrderedDict": dict}
        return plain.get(f"{module}.{name}", Unread)


def _read_metadata(path: Path) -> Any:
    data = disk.read_file(path.resolve(), MAX_METADATA_NBYTES)
    if len(data) > MAX_METADATA_NBYTES:
        raise ValueError(f"larger than {MAX_METADATA_NBYTES} bytes")
    return _Reader(io.BytesIO(data)).load()


def _matrices(folder: Path, metadata: Any) -> dict[str, Tensor]:
    places = {}
    for key, place in metadata.storage_data.items():
        places[key.fqn, getattr(key, "offset", None) or ()] = place
    matrices, files = {}, dict[Path, SourceFile]()
    values = lru_cache(maxsize=1)(_values)  # a tensor stays in memory until another is read
    for key, found in metadata.state_dict_metadata.items():
        if not key.startswith("model.") or not hasattr(found, "chunks"):
            continue
        pieces = sorted(found.chunks, key=lambda piece: piece.offsets)
        tensors = [_read(folder, key, places, piece, files, values) for piece in pieces]
        _check_pieces(folder, key, check_shape(key, found.size), pieces)
        matrices[key.removeprefix("model.")] = joined(tensors, axis=0)
    return matrices


def _check_pieces(folder: Path, key: str, shape: tuple[int, ...], pieces: list[Any]) -> None:
    at, name = 0, one_line(key)
    for piece in pieces:
        whole_rows = piece.sizes[1:] == shape[1:] and not any(piece.offsets[1:])
        if not whole_rows or piece.offsets[0] != at:
            raise CheckpointError(
                f"{folder}: tensor {name} is not split along its rows alone; consolidate the "
                "checkpoint with the trainer's own tool first"
            )
        at += piece.sizes[0]
    if not pieces or shape[:1] != (at,):
        raise CheckpointError(
            f"{folder}: {name}: the distributed checkpoint has {at} of {sum(shape[:1])} rows; the "
            "file of a rank is missing: copy the whole folder"
        )


def _read(
    folder: Path,
    key: str,
    places: dict[Any, Any],
    piece: Any,
    files: dict[Path, SourceFile],
    values: Values,
) -> Tensor:
    """Open a piece of a tensor; it must have the size that the index gives."""
    name = one_line(key)
    if (key, piece.offsets) not in places:
        raise ValueError(f"tensor {name} has no place in the index")
    place = places[key, piece.offsets]
    path = folder / place.relative_path
    if Path(place.relative_path).name != place.relative_path or "\\" in place.relative_path:
        raise ValueError(f"tensor {name} is in {place.relative_path!r}, outside of the folder")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"tensor {name} is stored compressed; save it without extensions")
    if path not in files:
        files[path] = SourceFile(path)
    end = place.offset + place.length
    if min(place.offset, place.length) < 0 or end > files[path].nbytes:
        raise CheckpointError(
            f"{path}: has {files[path].nbytes} bytes, but tensor {name} needs {end}; the file is "
            "truncated: copy it again"
        )
    tensor = guarded(path, lambda: _opened(files[path], place.offset, place.length, values))
    if not isinstance(tensor, Tensor) or tensor.shape != piece.sizes or not piece.sizes:
        raise CheckpointError(
            f"{path}: found a {type(tensor).__name__} at byte {place.offset}; expected a tensor "
            f"{list(piece.sizes)}: the checkpoint is damaged, copy it again"
        )
    return check_type(tensor.named(name))


def _opened(file: SourceFile, start: int, nbytes: int, values: Values) -> Any:
    """Open the tensor in a part of a file."""
    check_archive(_part(file, start, nbytes))
    tensor = read_archive(file.path, _part(file, start, nbytes), map_location="meta")

    def rows(first: int, last: int) -> F32:
        return values(file, start, nbytes).rows(first, last)

    return replace(tensor, rows=rows) if isinstance(tensor, Tensor) else tensor


def _values(file: SourceFile, start: int, nbytes: int) -> Tensor:
    found: Tensor = read_archive(file.path, _part(file, start, nbytes))
    return found


def _part(file: SourceFile, start: int, nbytes: int) -> IO[bytes]:
    return cast(IO[bytes], _FilePart(file, start, nbytes))


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
