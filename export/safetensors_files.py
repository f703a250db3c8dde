"""Tensors in the safetensors files of a folder, mapped and not read before they are asked for.

A folder has model.safetensors, or model.safetensors.index.json and the files that it names.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from stem_edge.errors import CheckpointError
from stem_edge.export.settings import one_line
from stem_edge.quantize import F32

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # bytes of a value
INTEGERS = {"I32": 4, "I64": 8}


class StoredTensor:
    """A Matrix over one tensor, or over the matrices [N, K] that are stacked in one [E, N, K]."""

    def __init__(self, file: Any, path: Path, name: str) -> None:
        piece = file.get_slice(name)
        self.path, self.name = path, name
        self.shape: tuple[int, ...] = tuple(piece.get_shape())
        self.dtype: str = piece.get_dtype()
        self.nbytes = math.prod(self.shape) * (FLOATS | INTEGERS).get(self.dtype, 1)
        self._file = file

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32."""
        values = self._file.get_slice(self.name)[start:stop]
        return cast(F32, values.to(torch.float32).numpy())

    def integers(self) -> npt.NDArray[np.int64]:
        """All of it as int64."""
        values = self._file.get_slice(self.name)[:]
        return cast(npt.NDArray[np.int64], values.to(torch.int64).numpy())


class TensorFiles:
    """All tensors of a folder. Each must be taken: one that is left over would go unnoticed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: dict[str, StoredTensor] = {}
        listed = None if (folder / WEIGHTS).is_file() else _read_index(folder)
        for path in [folder / WEIGHTS] if listed is None else listed:
            tensors = open_tensors(path)
            if twice := sorted(tensors.keys() & self._left):
                raise CheckpointError(
                    f"{path}: {twice[0]} is in {self._left[twice[0]].path.name}, too; "
                    "the files are of different runs"
                )
            self._left |= tensors
        for path, names in (listed or {}).items():
            if gone := [n for n in names if n not in self._left or self._left[n].path != path]:
                raise CheckpointError(
                    f"{path}: no tensor {gone[0]}, which {INDEX} places there; copy all files again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def names(self) -> list[str]:
        """Names of what was not taken yet."""
        return sorted(self._left)

    def take(self, name: str, dtypes: dict[str, int] = FLOATS) -> StoredTensor:
        """The tensor of that name, if it is of one of these types."""
        if name not in self._left:
            raise CheckpointError(
                f"{self._folder}: no tensor {name} in its safetensors files; check that config.json "
                "belongs to them and that all files are there"
            )
        tensor = self._left.pop(name)
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor.path}: {name} is {tensor.dtype}; expected one of {', '.join(dtypes)}: "
                "export from weights that are not quantized"
            )
        return tensor


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_index(folder: Path) -> dict[Path, list[str]]:
    """File -> names of its tensors."""
    path = folder / INDEX
    try:
        places = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except FileNotFoundError:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise CheckpointError(
            f"{folder}: neither {WEIGHTS} nor {INDEX}, found {found}; save the model as safetensors"
        ) from None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of safetensors files ({error})") from error
    listed: dict[Path, list[str]] = {}
    for name, file in places.items():
        if not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise CheckpointError(
                f"{path}: tensor {one_line(name)} lies in {file!r}; expected a .safetensors file of this folder"
            )
        listed.setdefault(folder / file, []).append(name)
    return listed


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of one safetensors file."""
    try:
        # It stays mapped while a tensor of it is used, as the files of torch do.
        file = safe_open(path, framework="pt")
        names: list[str] = file.keys()  # type: ignore[no-untyped-call]
        return {name: StoredTensor(file, path, name) for name in names}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; copy all files of the model") from error
    except Exception as error:  # the library raises a class of its own, which is a plain Exception
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{path}: not a safetensors file ({reason}); it is cut or damaged: copy it again"
        ) from error
