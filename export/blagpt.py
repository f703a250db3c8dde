"""Checkpoints of BlaGPT's trainer: state_step*.pt and best_model*.pt.

Such a file holds the model's options and tensors, and the trainer's source, which nothing reads.
What the options mean is a fact about that trainer and stated where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stem_edge.config import MAX_WIDTH, ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.blagpt_options import Options, model_config, read_options
from stem_edge.export.checkpoint import (
    Checkpoint,
    SourceMatrix,
    TokenizerSource,
    check_shapes,
    same_values,
)
from stem_edge.export.heads import HeadRows
from stem_edge.export.settings import one_line
from stem_edge.export.stored import StoredTensor, check_type
from stem_edge.export.torch_files import describe, load_tensors

STATES = ("best_model*.pt", "state_step*.pt")  # as a last resort, and as a rule
WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")

TOP_NAMES = {"transformer.wte": "embedding", "transformer.ln_f": "norm", "lm_head": "head"}
LAYER_NAMES = {
    "ln_1": "attention_norm",
    "ln_2": "ffn_norm",
    "ln_3": "attention_post_norm",
    "ln_4": "ffn_post_norm",
    "attn.q_proj": "wq",
    "attn.q_norm": "q_norm",
    "attn.k_norm": "k_norm",
    "attn.c_proj": "wo",
    "mlp.c_gate": "gate",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
FUSED, TABLE = "attn.kv_proj", "mlp.stem_embedding"
TURNED = ("wq", "wk", "q_norm", "k_norm")  # rows in the order that RoPE pairs them


def find_states(path: Path) -> list[Path]:
    """The file itself, or those in a folder, the one to export last."""
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    return [p for glob in STATES for p in sorted(path.glob(glob), key=_step) if p.is_file()]


def _step(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.stem)
    return (int(digits[-1][:18]) if digits else -1, path.name)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a state of BlaGPT's trainer, or the last one in a folder. Raises CheckpointError."""
    states = find_states(Path(path))
    if not states:
        raise CheckpointError(
            f"{path}: no state of BlaGPT's trainer; expected {' or '.join(reversed(STATES))}"
        )
    file, others = states[-1], ", ".join(state.name for state in states[:-1])
    config, tensors = _read_state(file)
    backbone, tables = _convert(config, tensors)
    checkpoint = Checkpoint(
        path=file,
        config=config,
        backbone=backbone,
        tables=tables,
        tokenizer=TokenizerSource("json", file.with_name("tokenizer.json"), add_bos=False),
        notes=(f"{file.name} of {len(states)} states, not {one_line(others)}",) if others else (),
        names=_names(config),
    )
    return check_shapes(checkpoint)


def _read_state(path: Path) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """What a file says of the model, the two halves compared."""
    state = load_tensors(path)
    described, saved = state.get("model_config"), state.get("model")
    if not isinstance(described, dict) or not isinstance(saved, dict):
        raise CheckpointError(
            f"{path}: found {one_line(', '.join(map(str, state)))}; expected 'model_config' and "
            "'model', as BlaGPT's trainer saves them: give one of its state_step*.pt"
        )
    options = read_options(path, described)
    tensors = _read_tensors(path, saved)
    _check_tables(path, options, tensors)
    if options.use_top:
        tensors.pop("top_head.weight", None)  # trains the others, predicts nothing
    if options.tie_embed_weights:
        _drop_tied_head(path, tensors)
    return model_config(path, options), tensors


def _read_tensors(path: Path, saved: dict[Any, Any]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for key, tensor in saved.items():
        name = WRAPPERS.sub("", str(key))
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{path}: {one_line(key)} is {one_line(describe(tensor))} without plain values; "
                "expected a tensor"
            )
        if len(tensor.shape) not in (1, 2) or name in tensors:
            raise CheckpointError(
                f"{path}: {one_line(key)} is {list(tensor.shape)}; expected each matrix and vector "
                "once"
            )
        tensors[name] = check_type(tensor.named(one_line(name)))
    return tensors


def _check_tables(path: Path, options: Options, tensors: Mapping[str, StoredTensor]) -> None:
    layers = range(options.n_layer)
    found = [n for n in layers if f"transformer.h.{n}.{TABLE}.weight" in tensors]
    if found != list(options.stem()):
        raise CheckpointError(
            f"{path}: model_config asks for tables in layers {list(options.stem())}, the weights "
            f"have them in {found}; the file was put together from two runs"
        )


def _drop_tied_head(path: Path, tensors: dict[str, StoredTensor]) -> None:
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("transformer.wte.weight")
    if head is None or embedding is None:
        return
    if head.dtype != embedding.dtype or not same_values(head, embedding):
        raise CheckpointError(
            f"{path}: tie_embed_weights is True, but lm_head.weight is not transformer.wte.weight; "
            "expected them to be equal: one of them was changed after training"
        )


def _convert(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, SourceMatrix], dict[int, SourceMatrix]]:
    """Backbone and tables; a tensor that is not known keeps its name, for check_shapes to refuse."""
    backbone: dict[str, SourceMatrix] = {}
    tables: dict[int, SourceMatrix] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        end = "" if kind == "weight" else f".{kind}"
        match = re.fullmatch(r"transformer\.h\.(\d{1,4})\.(.+)", module)
        at, part = (f"layers.{match[1]}.", match[2]) if match else ("", module)
        if match and part == TABLE and not end:
            tables[int(match[1])] = tensor
        elif match and part == FUSED:
            split = config.n_kv_heads * config.head_dim
            backbone[f"{at}wk{end}"] = _turned(tensor.part(0, split), config.head_dim)
            backbone[f"{at}wv{end}"] = tensor.part(split, tensor.shape[0])
        elif known := (LAYER_NAMES if match else TOP_NAMES).get(part):
            turned = known in TURNED
            backbone[f"{at}{known}{end}"] = _turned(tensor, config.head_dim) if turned else tensor
        else:
            backbone[name] = tensor
    return backbone, tables


def _turned(tensor: StoredTensor, head_dim: int) -> SourceMatrix:
    """Rows of q or k with the halves of each head swapped.

    The trainer turns (a, b) by the negative angle; that is (b, a) turned by the positive one.
    """
    rows = tensor.shape[0]
    if rows % head_dim or rows > MAX_WIDTH:
        return tensor  # which check_shapes refuses
    return HeadRows(tensor, np.arange(head_dim).reshape(2, -1)[::-1].ravel(), tensor.nbytes)


def _names(config: ModelConfig) -> dict[str, str]:
    """Modules whose matrix is the trainer's own, row by row."""
    kept = {part: name for part, name in LAYER_NAMES.items() if name not in TURNED}
    return TOP_NAMES | {
        f"transformer.h.{layer}.{part}": f"layers.{layer}.{name}"
        for layer in range(config.n_layers)
        for part, name in kept.items()
    }
