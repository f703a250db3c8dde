"""Reads checkpoints that transformers' gemma quantization made (quant_method "gemma" in config.json).

tensor_files/packed.py decodes the matrices; their bits (2, 4 or 8) follow from their shapes. Modules also
have activation scales: inputs and outputs are rounded to multiples of these scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.packed import PACKED, packed
from stem_edge.export.tensor_files.safetensors import TensorFiles, open_folder
from stem_edge.export.tensor_files.tensor import FLOATS, Tensor

QUANTIZED, GEMMA = "quantization_config", "gemma"
EMBEDDED, EMBEDDED_SCALE = ".embedding_quantized", ".embedding_scale"
SCALE = ".weight_scale"
STEPS = (".input_activation_scale", ".output_activation_scale")
# Scales of a quantized KV cache: transformers does not read them, either.
UNUSED = re.compile(r".*\.[kv]_cache_scale")


class PackedFiles(TensorFiles):
    """Tensors of a folder with packed 2-, 4- or 8-bit matrices. widths: name -> number of columns."""

    def __init__(self, folder: Path, widths: Mapping[str, int]) -> None:
        super().__init__(folder, open_folder(folder))
        self._widths = widths

    def _taken(self, name: str, dtypes: Collection[str]) -> Tensor:
        """Remove and return a tensor: packed matrices are decoded, others must be of `dtypes`."""
        module, codes, taken = name.removesuffix(".weight"), name, super()._taken
        scales = module + SCALE
        if module + EMBEDDED in self:
            codes, scales = module + EMBEDDED, module + EMBEDDED_SCALE
        if scales not in self or name not in self._widths:
            return taken(name, dtypes)
        return packed(taken(codes, PACKED), taken(scales, FLOATS), self._widths[name])

    def steps(self, module: str) -> tuple[float, float]:
        """Return a module's input and output activation scales; 0 if missing. Raises CheckpointError."""
        one, other = (self._step(module + name) for name in STEPS)
        return one, other

    def _step(self, name: str) -> float:
        if name not in self:
            return 0.0
        tensor = super()._taken(name, FLOATS)
        if tensor.shape not in ((), (1,)):
            raise CheckpointError(
                f"{tensor.path}: {name} is {list(tensor.shape)}; expected one number"
            )
        return float(np.ravel(tensor.rows(0, 1))[0])
