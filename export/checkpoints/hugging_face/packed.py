"""Tensors of a Gemma model that was trained for few bits (quant_method gemma of transformers).

Matrices are codes with a scale for each row; beside them are the steps to which their inputs and results
are rounded. The number of bits follows from the sizes, so the patterns in config.json are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.packed_tensor import PACKED, PackedTensor, packed
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.stored_tensor import FLOATS, StoredTensor

METHOD = "gemma"  # quant_method in config.json
EMBEDDED, EMBEDDED_SCALE = ".embedding_quantized", ".embedding_scale"
SCALE = ".weight_scale"
STEPS = (".input_activation_scale", ".output_activation_scale")
# Beside keys and values of caches: transformers does not read them, either.
UNUSED = re.compile(r".*\.[kv]_cache_scale")


class PackedFiles:
    """Tensors of a folder, like TensorFiles; matrices may be packed.

    widths: name of a matrix -> its columns.
    """

    def __init__(self, files: TensorFiles, widths: Mapping[str, int]) -> None:
        self._files, self._widths = files, widths

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """Names of the tensors that were not taken yet."""
        return self._files.names

    def look(self, name: str) -> StoredTensor | PackedTensor:
        """Return a matrix, which can still be taken. Raises CheckpointError."""
        return PackedFiles(self._files.again(), self._widths).take(name)

    def take(self, name: str, dtypes: dict[str, int] = FLOATS) -> StoredTensor | PackedTensor:
        """Take a matrix, packed if it has scales. Raises CheckpointError."""
        module, codes = name.removesuffix(".weight"), name
        scale = module + SCALE
        if module + EMBEDDED in self._files:
            codes, scale = module + EMBEDDED, module + EMBEDDED_SCALE
        if scale not in self._files or name not in self._widths:
            return self._files.take(name, dtypes)
        return packed(self._files.take(codes, PACKED), self._files.take(scale), self._widths[name])

    def steps(self, module: str) -> tuple[float, float]:
        """Take the steps of a module's input and result; 0: none. Raises CheckpointError."""
        one, other = (self._step(module + name) for name in STEPS)
        return one, other

    def _step(self, name: str) -> float:
        if name not in self._files:
            return 0.0
        tensor = self._files.take(name)
        if tensor.shape not in ((), (1,)):
            raise CheckpointError(
                f"{tensor.path}: {name} is {list(tensor.shape)}; expected one number"
            )
        return float(np.ravel(tensor.all())[0])


Files: TypeAlias = TensorFiles | PackedFiles
