"""Reads a checkpoint from llama.cpp's GGUF file, or from the files of a split model.

Keys and tensor names are translated to those of Hugging Face (gguf_keys.py), so that hugging_face/ alone
describes each family. For llama, rows of q and k are reordered as in Hugging Face's files, where
RoPE rotates halves of a head. The model is then the same on both engines, LoRA adapters fit, and
onnxruntime runs its fastest RoPE. Quantized codes do not change, because blocks lie within rows.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.checkpoints.gguf_keys import (
    ARCHITECTURES,
    IGNORED,
    TABLE,
    Keys,
    Tensors,
    described,
)
from stem_edge.export.checkpoints.head_padding import order_heads
from stem_edge.export.checkpoints.hugging_face import gemma_ple
from stem_edge.export.checkpoints.hugging_face.config import Decoder
from stem_edge.export.checkpoints.hugging_face.generation_config import of_gguf
from stem_edge.export.checkpoints.hugging_face.reader import KINDS, assembled
from stem_edge.export.tensor_files.gguf import GgufFile, Value, open_gguf
from stem_edge.export.tensor_files.gguf_tensor import coded_rows, stacked_matrix
from stem_edge.export.tensor_files.json import convert_options, one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.layers import BIASED, LENT

LLAMA = "llama"
ADVICE = "export the original model, or a file of another converter"
CONTEXT = "per_layer_model_proj.weight"  # one matrix for all layers
STREAMS = {"altup_in": "altup_proj", "altup_out": "altup_unembd_proj"}
# Parts of Gemma 3n that no backbone.gguf has.
ALTUP = {
    "altup_norm": "altup_router_norm",
    "altup_router": "altup_router",
    "altup_predict": "altup_predict_coef",
    "altup_correct": "altup_correct_coef",
    "ple_gate_scale": "altup_correct_scale",
    "laurel_in": "laurel_l",
    "laurel_out": "laurel_r",
    "laurel_norm": "laurel_post_norm",
}


def read_checkpoint(path: Path) -> Checkpoint:
    file = open_gguf(path)
    found, content = file.keys.get("general.architecture"), file.keys.get("general.type", "model")
    if content != "model":
        raise CheckpointError(
            f"{path}: general.type is {one_line(repr(content))}; expected 'model': give the file of "
            "a whole language model"
        )
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {one_line(repr(found))}; expected one of "
            f"{', '.join(ARCHITECTURES)}: export the original model"
        )
    tensors, kind = dict(file.tensors), KINDS[ARCHITECTURES[found][0]]
    keys = _read_keys(file, found)
    try:
        decoder = convert_options(path, kind.text(described(found, keys, tensors)), kind)
        first = {part: "head" if part == "head" else f"layers.0.{part}" for part in BIASED}
        biases = tuple(part for part in BIASED if gguf_name(f"{first[part]}.bias") in tensors)
        config = msgspec.structs.replace(decoder.model(), biases=biases)
        if config.streams > 1:
            _split_streams(config, tensors)
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {one_line(error, 400)}; {ADVICE}") from error
    return assembled(
        decoder,
        config,
        _renamed(path, decoder, config, tensors, pairs=found == LLAMA),
        path=path,
        tokenizer=TokenizerSource("gguf", path, add_bos=None),
        sampling=of_gguf(path, file.keys),
    )


def _read_keys(file: GgufFile, architecture: str) -> Keys:
    """Read the keys of `architecture`. Raises CheckpointError if an unknown key is set (not 0)."""
    at, known = f"{architecture}.", IGNORED.union(Keys.__struct_encode_fields__)
    given: dict[str, Value] = {
        key.removeprefix(at): value for key, value in file.keys.items() if key.startswith(at)
    }
    for key, value in given.items():
        if value and key not in known:
            raise CheckpointError(
                f"{file.path}: {at}{one_line(key)} is {one_line(repr(value))}; expected no such key, "
                f"or 0: {ADVICE}"
            )
    return convert_options(file.path, {k: v for k, v in given.items() if k in known}, Keys)


def _split_streams(config: ModelConfig, tensors: Tensors) -> None:
    """Replace AltUp tensors [E, N, K] in `tensors` by E matrices [N, K] each."""
    shape = config.streams - 1, config.dim, config.dim
    for name in STREAMS.values():
        found = tensors.pop(f"{name}.weight", None)
        if found is None or found.shape != shape:
            shown = "missing" if found is None else list(found.shape)
            raise ValueError(f"{name}.weight is {shown}; expected {list(shape)}")
        for at in range(shape[0]):
            tensors[f"{name}.{at}.weight"] = stacked_matrix(found, at)


def _renamed(
    path: Path, decoder: Decoder, config: ModelConfig, tensors: Tensors, *, pairs: bool
) -> TensorFiles:
    """Return a file's tensors under Hugging Face's names, with rows in Hugging Face's order.

    pairs: True if RoPE rotates adjacent rows of a head in the file, as for llama.
    """
    borrowing = range(config.own_kv_layers, config.n_layers)
    unread = [f"layers.{layer}.{part}" for layer in borrowing for part in LENT]
    names = (*config.backbone_shapes(), *unread)
    theirs = {_name_in_gguf(name): decoder.tensor(name) for name in names}
    if isinstance(decoder, gemma_ple.GemmaPle) and TABLE in tensors:
        theirs[TABLE] = decoder.inside + gemma_ple.TABLE
        tensors[TABLE] = coded_rows(tensors[TABLE], config.ple_width)
    if pairs:
        halves = np.arange(config.head_dim).reshape(-1, 2).T.ravel()
        turned = [n for n, name in theirs.items() if ".q_proj." in name or ".k_proj." in name]
        tensors |= {n: order_heads(tensors[n], halves) for n in tensors.keys() & turned}
    return TensorFiles(
        path,
        {theirs.get(name, name): one for name, one in tensors.items()},
        {name: own for own, name in theirs.items()},
    )


def _name_in_gguf(name: str) -> str:
    at, _, part = name.rpartition(".")
    if part in STREAMS:
        return f"{STREAMS[part]}.{int(at.split('.')[1]) - 1}.weight"
    if part in ALTUP:
        return f"blk.{at.split('.')[1]}.{ALTUP[part]}.weight"
    return CONTEXT if part == "ple_context" else gguf_name(name)
