"""Save the demo model as a checkpoint in the public STEM trainer's layout or in this project's schema."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from demo_model import DemoModel, model_config
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.checkpoints.lingua import LAYER_NAMES, TOP_NAMES
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer

SHARDS = 2


def save_checkpoint(model: DemoModel, folder: Path, name: str, seed: int) -> None:
    """Write the trainer's training layout: params.json, the backbone, the tables as column shards."""
    state = model.state_dict()
    tables = {key: w for key, w in state.items() if key.startswith("stem_embeddings.")}
    backbone = {key: w for key, w in state.items() if key not in tables}
    with warnings.catch_warnings():  # one process is intended, so torch need not warn about it
        warnings.filterwarnings("ignore", "torch.distributed is")
        save_distributed({"model": backbone}, checkpoint_id=folder, no_dist=True)
    (folder / "stem_shards").mkdir(exist_ok=True)
    for shard in range(SHARDS):
        columns = {key: w.chunk(SHARDS, dim=1)[shard].clone() for key, w in tables.items()}
        torch.save(columns, folder / "stem_shards" / f"stem_model_mp{shard}.pt")
    sizes = asdict(model.config)
    width, tokenizer = model.config.stem_embedding_dim, "tokenizer.model"
    params = {
        "name": name,
        "seed": seed,
        "distributed": {"model_dtype": "fp32", "stem_parallel_size": SHARDS},
        "model": sizes | {"stem_embedding_dim": width, "weight_tying": False},
        "data": {
            "tokenizer": {"name": "tiktoken", "path": tokenizer},
            "add_bos": True,
            "add_eos": True,
        },
    }
    (folder / "params.json").write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")


def save_demo(model: DemoModel, out: Path, ranks: Path) -> None:
    """Write the model and its tokenizer (`ranks`, a tiktoken file) in this project's schema."""
    sys.path.append(str(Path(__file__).parents[1]))
    from stem_format import save_stem

    config, state = model_config(model.config), model.state_dict()
    names = {name: trained_name(name) for name in config.backbone_shapes()}
    tensors = {tensor_name(ours): state[own] for ours, own in names.items()}
    for layer, table in zip(model.config.stem_layers, model.stem_embeddings, strict=True):
        tensors[f"model.layers.{layer}.mlp.stem_table.weight"] = table.weight
    tokenizer = convert_tokenizer("tiktoken", ranks, add_bos=True)
    save_stem(out, config, tensors, tokenizer)


def trained_name(name: str) -> str:
    """Return the trainer's name of a tensor, given its name in stem_edge."""
    if not name.startswith("layers."):
        return {ours: theirs for theirs, ours in TOP_NAMES.items()}.get(name, name) + ".weight"
    _, layer, own = name.split(".", 2)
    theirs = {ours: theirs for theirs, ours in LAYER_NAMES.items()}.get(own, own)
    return f"layers.{layer}.{theirs}.weight"
