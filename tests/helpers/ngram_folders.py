"""Small checkpoints of models with tables of n-grams, and their tables as torch has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from stem_edge.tables.ngrams.schemes import keyed_tables

QWEN = {
    "model_type": "qwen4_exp",
    "text_config": {
        "vocab_size": 97, "ple_layer_ids": [2], "ple_embed_dim": 256, "ngram_size": 3,
        "heads_per_ngram": 4, "ngram_vocab_size_base": 40, "eos_token_id": 5,
    },
}  # fmt: skip
LONGCAT = {
    "model_type": "longcat_flash_ngram", "vocab_size": 97, "hidden_size": 48,
    "ngram_vocab_size_ratio": 0.5, "emb_neighbor_num": 3, "emb_split_num": 2, "eos_token_id": 5,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v41", "vocab_size": 12, "engram_layer_ids": [0, 3],
    "engram_num_embeddings": [], "engram_max_ngram_size": 3, "engram_n_heads": 2,
    "engram_head_dim": 64, "engram_vocab_size": 30, "engram_compressed_vocab_size": 9,
    "engram_pad_token_id": 2,
}  # fmt: skip
# Tokens 0, 1 and 4 are one class, as are 2 and 7: case, accents and space do not count.
TOKENS = ["a", "A", " b", "c", "\u00e1", "d", " ", "b", "!", "e", "f", "\u00df"]


class Model(NamedTuple):
    """A checkpoint, and the values of its tables."""

    folder: Path
    values: list[torch.Tensor]  # [rows, width] each


def _save(folder: Path, config: dict[str, Any], files: list[dict[str, torch.Tensor]]) -> None:
    """Write a folder whose index also names a file that is not there."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    places = {"model.embed_tokens.weight": "model-00000.safetensors"}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def qwen(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Write a table in three parts of bfloat16, or of float8 with a scale."""
    (table,) = keyed_tables(QWEN)
    rows = -(-table.hash.rows // 3) * 3  # padded, as the model's are
    values = torch.randn(rows, table.width, generator=torch.Generator().manual_seed(1))
    stored, scale = values.to(dtype), torch.tensor(0.125)
    prefix = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
    parts = [{f"{prefix}shard_{at}.weight": part} for at, part in enumerate(stored.chunk(3))]
    found = stored.float()
    if dtype == torch.float8_e4m3fn:
        parts[1][f"{prefix}weight_scale"] = scale
        found = found * scale
    _save(folder, QWEN, parts)
    return Model(folder, [found])


def longcat(folder: Path) -> Model:
    """Write a table for each head, two to a file."""
    (table,) = keyed_tables(LONGCAT)
    random = torch.Generator().manual_seed(2)
    heads = [
        torch.randn(size, table.width, generator=random).bfloat16() for size in table.hash.sizes
    ]
    prefix = "model.ngram_embeddings.embedders."
    named = [{f"{prefix}{at}.weight": head} for at, head in enumerate(heads)]
    _save(folder, LONGCAT, [named[0] | named[3], named[2] | named[1]])
    return Model(folder, [torch.cat(heads).float()])


def deepseek(folder: Path) -> Model:
    """Write two tables of float8 with an exponent for each 32 values, and a tokenizer."""
    config = DEEPSEEK | {"engram_num_embeddings": [rows_of(0), rows_of(1)]}
    files, values = list[dict[str, torch.Tensor]](), list[torch.Tensor]()
    random = torch.Generator().manual_seed(3)
    for table in keyed_tables(config):
        shape = (table.hash.rows, table.width)
        codes = torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
        exponents = torch.randint(120, 132, (shape[0], 2), generator=random)
        name = f"layers.{table.layer}.engram.embed."
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        files.append({f"{name}weight": codes, f"{name}scale": scales})
        powers = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
        values.append(codes.float() * powers)
    _save(folder, config, files)
    model = {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(TOKENS)}, "unk_token": "!"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Model(folder, values)


def rows_of(place: int) -> int:
    """Sum of the primes that a table of DEEPSEEK has: the next ones above 29 that none has."""
    return [31 + 37 + 41 + 43, 47 + 53 + 59 + 61][place]


MODELS: dict[str, Callable[[Path], Model]] = {
    "qwen": qwen,
    "qwen fp8": lambda folder: qwen(folder, torch.float8_e4m3fn),
    "longcat": longcat,
    "deepseek": deepseek,
}
