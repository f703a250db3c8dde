"""Checkpoints in Hugging Face's form: config.json and safetensors, in one file or several.

Dense models of the kinds in hf_config.py, and STEM models in this project's own schema
(stem_schema.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import (
    Checkpoint,
    SourceMatrix,
    TokenizerSource,
    check_shapes,
    same_values,
)
from stem_edge.export.checkpoints.hf_config import (
    Decoder,
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    module_names,
    read_config,
    tensor_name,
)
from stem_edge.export.checkpoints.stem_schema import MODEL_TYPE, Stem, read_index, read_tables
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
KINDS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    MODEL_TYPE: Stem,
}
# Not needed: saved by older versions, but derived from config.json.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors. Raises CheckpointError."""
    config, notes = read_config(path / CONFIG, KINDS)
    files = TensorFiles(path)
    backbone: dict[str, SourceMatrix] = {
        name: files.take(tensor_name(name)) for name in config.backbone_shapes()
    }
    tables, index = read_tables(config, files), read_index(config, files)
    checkpoint = Checkpoint(
        path=path,
        config=config,
        backbone=backbone,
        tables=tables,
        tokenizer=TokenizerSource("json", path / TOKENIZER, add_bos=None),
        notes=notes,
        index=index,
        names=module_names(backbone),
    )
    check_shapes(checkpoint)
    _check_rest(path, config, files, backbone["embedding"])
    return checkpoint


def _check_rest(
    folder: Path, config: ModelConfig, files: TensorFiles, embedding: SourceMatrix
) -> None:
    """Raise CheckpointError for tensors left over, unless they only repeat what is known."""
    head = tensor_name("head")
    for name in files.names:
        if DERIVED.fullmatch(name):
            continue
        if not (config.tied_head and name == head):
            raise CheckpointError(
                f"{folder}: tensor {one_line(name)} is not part of the model that {CONFIG} describes; "
                "check that both are from the same run"
            )
        if not same_values(files.take(name), embedding):
            raise CheckpointError(
                f"{folder}: {name} differs from the embedding, but tie_word_embeddings is true; set "
                f"it to false in {CONFIG} if the head is the model's own"
            )
