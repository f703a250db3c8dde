"""Checkpoints in a GGUF file, or in the files of a split one: llama.cpp's form of a model.

| general.architecture | models |
|---|---|
| llama | Llama, Mistral, SmolLM and others, which the file has rotate pairs |
| qwen2 | Qwen2 and Qwen2.5 |
| qwen3 | Qwen3 without experts |
| gemma3, gemma3n, gemma4 | see gguf_gemma.py |

The rows of q and k of llama are read in the order of Hugging Face, which rotates halves: so the model
is the same on both engines, adapters for the original fit, and onnxruntime has its fastest form.
Blocks lie within rows, so each row keeps its codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import (
    Checkpoint,
    TokenizerSource,
    check_shapes,
)
from stem_edge.export.checkpoints.gguf_gemma import Gemma3Keys, Gemma3nKeys, Gemma4Keys
from stem_edge.export.checkpoints.gguf_keys import Keys, Qwen2Keys, Qwen3Keys, Tensors
from stem_edge.export.checkpoints.head_padding import order_heads
from stem_edge.export.checkpoints.hugging_face.generation_config import of_gguf
from stem_edge.export.checkpoints.hugging_face.names import module_names
from stem_edge.export.tensor_files.gguf import GgufFile, Value, open_gguf
from stem_edge.export.tensor_files.json import convert_options, one_line
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.ggml.gguf_schema import gguf_name

SUFFIX = ".gguf"
LLAMA = "llama"
ADVICE = "export the original model, or a file of another converter"
KEYS: dict[str, type[Keys]] = {LLAMA: Keys, "qwen2": Qwen2Keys, "qwen3": Qwen3Keys}
KEYS |= {"gemma3": Gemma3Keys, "gemma3n": Gemma3nKeys, "gemma4": Gemma4Keys}
K = TypeVar("K", bound=Keys)


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, and the others of a split one. Raises CheckpointError."""
    file = open_gguf(path)
    architecture, keys, left = open_model(file, KEYS)
    try:
        config = keys.config(left)
        backbone = {
            name: _ordered(config, architecture, name, matrix)
            for name, matrix in keys.backbone(config, left).items()
        }
        tables, index = keys.tables(config, left), keys.index(config)
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {one_line(error, 400)}; {ADVICE}") from error
    if left:
        raise CheckpointError(
            f"{path}: tensor {one_line(min(left))} is not part of such a {architecture} model; "
            f"{ADVICE}"
        )
    checkpoint = Checkpoint(
        path=path,
        config=config,
        backbone=backbone,
        tables=tables,
        tokenizer=TokenizerSource("gguf", path, add_bos=None),
        index=index,
        sampling=of_gguf(path, file.keys),
        names=module_names(backbone, keys.modules),
    )
    return check_shapes(checkpoint)


def open_model(file: GgufFile, kinds: Mapping[str, type[K]]) -> tuple[str, K, Tensors]:
    """Return the model of a file: its architecture, its keys, and its tensors. Raises CheckpointError.

    kinds: what the keys of each architecture mean.
    """
    path = file.path
    found, kind = file.keys.get("general.architecture"), file.keys.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{path}: general.type is {one_line(repr(kind))}; expected 'model': give the file of "
            "a whole language model"
        )
    if not isinstance(found, str) or found not in kinds:
        raise CheckpointError(
            f"{path}: general.architecture is {one_line(repr(found))}; expected one of "
            f"{', '.join(kinds)}: export the original model"
        )
    keys, embedding = _read_keys(file, found, kinds[found]), gguf_name("embedding")
    if embedding not in file.tensors:
        raise CheckpointError(f"{path}: no tensor {embedding}; give the file of a whole model")
    return found, keys, dict(file.tensors)


def _read_keys(file: GgufFile, architecture: str, kind: type[K]) -> K:
    """Read the keys of the architecture, if no other changes the model. Raises CheckpointError."""
    at = architecture + "."
    given: dict[str, Value] = {
        key.removeprefix(at): value for key, value in file.keys.items() if key.startswith(at)
    }
    known = {*kind.__struct_encode_fields__} - kind.lacking | kind.ignored
    for key, value in given.items():
        if value and key not in known:
            raise CheckpointError(
                f"{file.path}: {at}{one_line(key)} is {one_line(repr(value))}; expected no such key, "
                f"or 0: {ADVICE}"
            )
    return convert_options(file.path, given, kind)


def _ordered(config: ModelConfig, architecture: str, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with the rows of its heads in the order of halves."""
    if architecture != LLAMA or name.removesuffix(".bias").rpartition(".")[2] not in ("wq", "wk"):
        return tensor
    if tensor.shape[0] % config.head_dim:
        return tensor  # check_shapes says what is wrong
    pairs = np.arange(config.head_dim).reshape(-1, 2)
    return order_heads(tensor, pairs.T.ravel())
