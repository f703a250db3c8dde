"""Reads quantized checkpoints with quant_method "gemma" or "compressed-tensors" in config.json.

tensor_files/packed.py decodes the matrices. Gemma also has activation scales, the steps to which a
module's inputs and outputs are rounded. The bits of a matrix (2, 4 or 8) follow from its shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.packed import BITS, PACKED, SHAPE, WORDS, grouped, packed
from stem_edge.export.tensor_files.safetensors import TensorFiles, open_folder
from stem_edge.export.tensor_files.tensor import FLOATS, Tensor

GEMMA, COMPRESSED = "gemma", "compressed-tensors"  # quant_method in config.json
QUANTIZED, PACKED_FORM = "quantization_config", "pack-quantized"
ROTATING = "transform_config", "kv_cache_scheme"  # keys that change the model or its cache
EMBEDDED, EMBEDDED_SCALE = ".embedding_quantized", ".embedding_scale"
SCALE = ".weight_scale"
GROUPED = ".weight_packed", SCALE, ".weight_zero_point", ".weight_shape"
STEPS = (".input_activation_scale", ".output_activation_scale")
# Scales of a quantized KV cache: transformers does not read them, either.
UNUSED = re.compile(r".*\.[kv]_cache_scale")


class PackedFiles(TensorFiles):
    """Tensors of a folder with packed matrices. widths: matrix name -> its number of columns."""

    def __init__(self, folder: Path, widths: Mapping[str, int]) -> None:
        super().__init__(folder, open_folder(folder))
        self._widths = widths

    def _taken(self, name: str, dtypes: dict[str, int]) -> Tensor:
        """Take a tensor; a matrix with scales is returned with its codes. Raises CheckpointError."""
        module, codes, taken = name.removesuffix(".weight"), name, super()._taken

        def take(part: str, types: dict[str, int] = FLOATS) -> Tensor:
            return taken(part, types)

        words, scales, zeros, shape = (module + part for part in GROUPED)
        if words in self and name in self._widths:  # tables of STEM are not packed
            points = take(zeros, WORDS) if zeros in self else None
            return grouped(take(words, WORDS), take(scales), points, take(shape, SHAPE))
        if module + EMBEDDED in self:
            codes, scales = module + EMBEDDED, module + EMBEDDED_SCALE
        if scales not in self or name not in self._widths:
            return take(name, dtypes)
        return packed(take(codes, PACKED), take(scales), self._widths[name])

    def steps(self, module: str) -> tuple[float, float]:
        """Return a module's input and output activation scales, or 0. Raises CheckpointError."""
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


def stores_codes(given: Mapping[str, Any], gemma: bool) -> bool:
    """Return True if a config.json describes quantized matrices in a form that PackedFiles reads.

    gemma: True for families that may have the quant_method "gemma".
    """
    found = given.get(QUANTIZED)
    if not isinstance(found, dict):
        return False
    if found.get("quant_method") == GEMMA:
        return gemma
    groups = found.get("config_groups")
    return (
        found.get("quant_method") == COMPRESSED
        and found.get("format") == PACKED_FORM
        and isinstance(groups, dict)
        and all(isinstance(group, dict) and _of_weights(group) for group in groups.values())
        and not any(found.get(key) for key in ROTATING)
    )


def _of_weights(group: Mapping[str, Any]) -> bool:
    """Return True if a group of compressed-tensors quantizes only weights, to integers."""
    weights = group.get("weights")
    # Codes of 7 bits need as many words as codes of 8 bits, so num_bits must be checked.
    integers = (
        isinstance(weights, dict)
        and weights.get("type") == "int"
        and weights.get("num_bits") in BITS
    )
    return integers and not group.get("input_activations") and not group.get("output_activations")
