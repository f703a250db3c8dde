"""Save the demo model as a checkpoint in the public STEM trainer's layout."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from demo_model import DemoModel

SHARDS = 2


def save_checkpoint(model: DemoModel, folder: Path, name: str, seed: int) -> None:
    """Write params.json, the backbone, and the tables as column shards."""
    state = model.state_dict()
    tables = {key: w for key, w in state.items() if key.startswith("stem_embeddings.")}
    backbone = {key: w for key, w in state.items() if key not in tables}
    torch.save({"model": backbone}, folder / "consolidated.pth")
    (folder / "stem_shards").mkdir(exist_ok=True)
    for shard in range(SHARDS):
        columns = {key: w.chunk(SHARDS, dim=1)[shard].clone() for key, w in tables.items()}
        torch.save(columns, folder / "stem_shards" / f"stem_model_mp{shard}.pt")
    sizes = asdict(model.config)
    width, tokenizer = model.config.stem_embedding_dim, "tokenizer.json"
    params = {
        "name": name,
        "seed": seed,
        "distributed": {"model_dtype": "fp32", "stem_parallel_size": SHARDS},
        "model": sizes | {"stem_embedding_dim": width, "weight_tying": False},
        "data": {
            "tokenizer": {"name": "json", "path": tokenizer},
            "add_bos": True,
            "add_eos": True,
        },
    }
    (folder / "params.json").write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")
