"""Reads checkpoints in Hugging Face's form: config.json with one or more safetensors files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import (
    Checkpoint,
    TokenizerSource,
    check_shapes,
    same_values,
)
from stem_edge.export.checkpoints.hugging_face.config import (
    Decoder,
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    read_config,
)
from stem_edge.export.checkpoints.hugging_face.gemma3 import Gemma3
from stem_edge.export.checkpoints.hugging_face.gemma3n import Gemma3n
from stem_edge.export.checkpoints.hugging_face.gemma4 import Gemma4
from stem_edge.export.checkpoints.hugging_face.generation_config import of_folder
from stem_edge.export.checkpoints.hugging_face.names import module_names, tensor_name
from stem_edge.export.checkpoints.hugging_face.packed import PackedFiles
from stem_edge.export.checkpoints.hugging_face.stem_schema import MODEL_TYPE, Stem
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles, open_folder
from stem_edge.export.tensor_files.tensor import Tensor

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
KINDS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3_text": Gemma3,
    "gemma3": Gemma3,
    "gemma4_text": Gemma4,
    "gemma4": Gemma4,
    "gemma3n_text": Gemma3n,
    "gemma3n": Gemma3n,
    MODEL_TYPE: Stem,
}
# Not needed: saved by older versions, but derived from config.json.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors. Raises CheckpointError."""
    config, decoder, notes, is_packed = read_config(path / CONFIG, KINDS)
    files = (
        PackedFiles(path, decoder.widths(config))
        if is_packed
        else TensorFiles(path, open_folder(path))
    )
    if isinstance(files, PackedFiles) and (head := tensor_name("head")) in files:
        # transformers never ties packed matrices, whatever tie_word_embeddings says.
        again = PackedFiles(path, decoder.widths(config))  # because a tensor can be taken only once
        own, embedding = again.take(head), again.take(decoder.tensor("embedding"))
        config = msgspec.structs.replace(config, tied_head=same_values(own, embedding))
    return assembled(
        decoder,
        config,
        files,
        path=path,
        tokenizer=TokenizerSource("json", path / TOKENIZER, add_bos=None),
        notes=notes,
        sampling=of_folder(path),
    )


def assembled(
    decoder: Decoder, config: ModelConfig, files: TensorFiles, **described: Any
) -> Checkpoint:
    """Build a Checkpoint from `files`. described: its other fields. Raises CheckpointError."""
    path, backbone = described["path"], decoder.backbone(config, files)
    if isinstance(files, PackedFiles):
        try:
            config = msgspec.structs.replace(config, ranges=_ranges(backbone, decoder, files))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; copy the model again") from error
    checkpoint = Checkpoint(
        config=config,
        backbone=backbone,
        tables=decoder.tables(config, files),
        index=decoder.index(config, files),
        names=module_names(backbone, decoder.names()),
        **described,
    )
    check_shapes(checkpoint)
    _check_rest(path, config, decoder, files, backbone["embedding"])
    return checkpoint


def _ranges(
    backbone: Mapping[str, Tensor], decoder: Decoder, files: PackedFiles
) -> dict[str, tuple[float, float]]:
    """Return matrix name -> scales of its (input, output). Raises ValueError for weights with a scale per group."""
    modules = dict[str, str]()
    for name, matrix in backbone.items():
        if len(matrix.shape) != 2 or name == "embedding":
            continue
        if matrix.codes is not None and matrix.codes.group_size < matrix.shape[1]:
            raise ValueError(f"{matrix.name} has not one scale for each row")
        same = name.replace("wv", "wk")  # if V uses the matrix of K
        module = modules[same] if name != same and backbone[same] is matrix else ""
        modules[name] = module or decoder.tensor(name).removesuffix(".weight")
    modules["head"] = tensor_name("head").removesuffix(".weight")
    steps = {module: files.steps(module) for module in dict.fromkeys(modules.values())}
    return {name: steps[module] for name, module in modules.items() if any(steps[module])}


def _check_rest(
    folder: Path,
    config: ModelConfig,
    decoder: Decoder,
    files: TensorFiles,
    embedding: Tensor,
) -> None:
    """Raise CheckpointError for unknown tensors, or if a tied head differs from `embedding`."""
    head, where = tensor_name("head"), CONFIG if folder.is_dir() else "its header"
    for name, tensor in files.left.items():
        if name not in files or DERIVED.fullmatch(name) or decoder.unused(name):
            continue
        if not (config.tied_head and name == head):
            raise CheckpointError(
                f"{folder}: tensor {one_line(tensor.name)} is not part of the model that "
                f"{where} describes; check that both are from the same run"
            )
        if not same_values(files.take(name), embedding):
            raise CheckpointError(
                f"{folder}: {name} differs from the embedding, but tie_word_embeddings is true; set "
                f"it to false in {CONFIG} if the head is the model's own"
            )
