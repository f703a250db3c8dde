"""Merges a PEFT LoRA adapter into a checkpoint while its rows are read: W + scale * B A.

    adapter_config.json  adapter_model.safetensors

Sums are computed in float32, whatever the stored types are. The checkpoint's files do not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.tensor_files.json import one_line, read_json, read_options
from stem_edge.export.tensor_files.safetensors import open_tensors
from stem_edge.export.tensor_files.tensor import Tensor, check_type
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import F32

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADVICE = "merge it with PEFT (merge_and_unload) and export the merged model"

PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
PART = re.compile(rf"(.+?)\.({re.escape(A)}|{re.escape(B)})")

EXPECTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # With other methods, PEFT changes W before training, so the checkpoint's W is not the base.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# Not needed: the tensors show which modules are adapted, and the other options are for training.
IGNORED = {
    *("target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out"),
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("peft_version", "megatron_core", "qalora_group_size", "eva_config"),
}


class Options(msgspec.Struct):
    """Options in adapter_config.json that change the merged weights."""

    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
    use_rslora: bool = False


def merge_lora(checkpoint: Checkpoint, adapter: str | Path) -> Checkpoint:
    """Return the checkpoint with a LoRA adapter (PEFT's folder) merged. Raises CheckpointError."""
    folder = Path(adapter)
    missing = "give the folder that PEFT's save_pretrained wrote"
    given = read_json(folder / CONFIG, "the options of an adapter", dict[str, Any], missing=missing)
    given = {"peft_type": None} | given
    options = read_options(
        folder / CONFIG, given, Options, expected=EXPECTED, ignored=IGNORED, advice=ADVICE
    )
    path = folder / WEIGHTS
    modules = _read_modules(path)
    backbone = dict(checkpoint.backbone)
    # Layers without a matrix for V use the matrix for K, so both must be merged as one.
    keys = {name: name.removesuffix("wv") + "wk" for name in backbone if name.endswith(".wv")}
    shared = {v: k for v, k in keys.items() if backbone[v] is backbone[k]}
    for module, parts in modules.items():
        name = checkpoint.names.get(module, "")
        if name not in backbone or name in shared:
            raise CheckpointError(
                f"{path}: {one_line(PREFIX + module)} is not a matrix of this model that can be "
                f"merged; {ADVICE}"
            )
        backbone[name] = _merged(path, module, backbone[name], parts, options)
    backbone |= {value: backbone[key] for value, key in shared.items()}
    note = f"with the LoRA adapter {folder.resolve().name} merged into {len(modules)} modules"
    notes = (*checkpoint.notes, note)
    return replace(checkpoint, backbone=backbone, notes=notes)


def _read_modules(path: Path) -> dict[str, dict[str, Tensor]]:
    """Open an adapter file; return module -> name of A or B -> tensor. Raises CheckpointError."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in open_tensors(path).items():
        match = PART.fullmatch(name.removeprefix(PREFIX))
        if match is None or not name.startswith(PREFIX):
            raise CheckpointError(
                f"{path}: {one_line(name)} is not a tensor of plain LoRA; expected "
                f"{PREFIX}<module>.{A} or {B}: {ADVICE}"
            )
        modules.setdefault(match[1], {})[match[2]] = check_type(tensor)
    if not modules:
        raise CheckpointError(f"{path}: has no tensors; expected those of a LoRA adapter")
    return modules


def _merged(
    path: Path, module: str, base: Tensor, parts: Mapping[str, Tensor], options: Options
) -> Tensor:
    rank, (rows, columns) = options.r, (*base.shape, 0)[:2]
    for part, shape in ((A, (rank, columns)), (B, (rows, rank))):
        found = list(parts[part].shape) if part in parts else "missing"
        if found != list(shape):
            raise CheckpointError(
                f"{path}: {one_line(f'{PREFIX}{module}.{part}')} is {found}, expected {list(shape)}; "
                f"the adapter is for another model, or {CONFIG} from another adapter"
            )
    scale = np.float32(options.lora_alpha / (math.sqrt(rank) if options.use_rslora else rank))

    def summed(start: int, stop: int) -> F32:
        product = parts[B].rows(start, stop) @ whole(parts[A])
        return np.asarray(base.rows(start, stop) + scale * product, np.float32)

    return base.computed(summed)
