"""Opens the safetensors files of a folder; rows of tensors are read from the file when needed.

A folder has model.safetensors, or model.safetensors.index.json and the files that the index names. A file consists of
eight bytes with the header's length, the header in JSON, and the values. The safetensors library checks the header. It
does not read the values, because it maps files, and a mapped file that is cut off ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import check_json, one_line, read_json, reason_of, some
from stem_edge.export.tensor_files.source_file import ZIP, SourceFile, looks_like
from stem_edge.export.tensor_files.tensor import (
    FLOATS,
    Tensor,
    check_shape,
    check_type,
    file_tensor,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_NBYTES = 100_000_000  # of the library


class TensorFiles:
    """Tensors of a checkpoint by name. `take` removes a tensor, so `left` has the unused tensors."""

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str] | None = None
    ) -> None:
        """names: name of a tensor -> its name in the file, if different; for messages."""
        self._path, self._left, self._names = path, dict(tensors), names or {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def left(self) -> dict[str, Tensor]:
        """Tensors that were not taken, in the order of their names."""
        return dict(sorted(self._left.items()))

    def take(
        self, name: str, dtypes: Collection[str] = FLOATS, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Remove and return a tensor. Raises CheckpointError unless `dtypes` and `shape` allow it."""
        tensor = self._taken(name, dtypes)
        if shape not in (None, tensor.shape):
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} is {list(tensor.shape)}; expected {list(shape or ())}, "
                "as config.json says: check that all files are of the same run"
            )
        return tensor

    def _taken(self, name: str, dtypes: Collection[str]) -> Tensor:
        if name not in self._left:
            raise CheckpointError(
                f"{self._path}: no tensor {self._names.get(name, name)}; check that all files are of this "
                "model and none is missing, or export the original model"
            )
        tensor = self._left.pop(name)
        return tensor if tensor.raw is None else check_type(tensor, dtypes)


def open_folder(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Open a folder's tensors for whose names `wanted` returns True; return name -> tensor.

    Files without such tensors may be missing. Raises CheckpointError.
    """
    if (folder / WEIGHTS).is_file():
        return {n: tensor for n, tensor in open_tensors(folder / WEIGHTS).items() if wanted(n)}
    found = dict[str, Tensor]()
    for path, names in read_index(folder, wanted).items():
        tensors = open_tensors(path)
        if gone := [f"{name} is not in {path.name}" for name in names if name not in tensors]:
            raise CheckpointError(
                f"{folder / INDEX}: does not match the files ({some(gone)}); copy all files again"
            )
        found |= {name: tensors[name] for name in names}
    return found


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(folder: Path, wanted: Callable[[str], bool]) -> dict[Path, list[str]]:
    """Read a folder's index: file -> names of the wanted tensors in it. Raises CheckpointError."""
    path = folder / INDEX
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
    missing = f"nor {WEIGHTS}, found {one_line(found)}; copy them, or save the model as safetensors"
    index = read_json(path, "an index of safetensors files", _Index, missing=missing)
    listed, outside = dict[Path, list[str]](), list[str]()
    for name, file in ((name, file) for name, file in index.weight_map.items() if wanted(name)):
        if re.fullmatch(r"[^/\\\0]{1,200}\.safetensors", file):
            listed.setdefault(folder / file, []).append(name)
        else:
            outside.append(f"{one_line(name)} is in {one_line(ascii(file))}")
    if outside:
        raise CheckpointError(
            f"{path}: tensor {some(outside)}; expected a .safetensors file of this folder"
        )
    return listed


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def open_tensors(path: Path) -> dict[str, Tensor]:
    file = SourceFile(path)
    try:
        return _read(file)
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file ({reason_of(error)}); it is truncated or damaged: copy "
            "it again"
        ) from error


def _read(file: SourceFile) -> dict[str, Tensor]:
    head, what = file.head, looks_like(file.head)
    # A header's length can look like a pickle, which is fine. A zip archive must be refused, because
    # other tools would read other tensors from it.
    if what is not None and (head[8:9] != b"{" or head.startswith(ZIP)):
        raise ValueError(f"it is {what}")
    length = int.from_bytes(head[:8], "little")
    # Checked first, because the library takes ten times the bytes of a header. It refuses other lengths.
    header = file.read(8, length) if length <= min(file.nbytes - 8, MAX_HEADER_NBYTES) else b""
    check_json(header)
    with safe_open(file.path.resolve(), "np"):
        pass  # it raises an error unless the tensors fill the file, each with the bytes of its shape
    fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    fields.pop("__metadata__", None)
    tensors = dict[str, Tensor]()
    for name, raw in fields.items():
        entry = msgspec.json.decode(raw, type=_Tensor)
        shape = check_shape(one_line(name), entry.shape)
        start = 8 + length + entry.data_offsets[0]
        tensors[name] = file_tensor(file, name, entry.dtype, shape, start)
    return tensors
