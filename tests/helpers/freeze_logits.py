"""Write tests/data/blackbox.npz: logits of the models of models.py by torch and transformers.

    python tests/helpers/freeze_logits.py     # with tools/ and tests/helpers/ in PYTHONPATH

STEM models are computed by torch_model.py and torch_engram.py, n-grams here from LongCat's formulas
(arXiv 2601.21204), Gemmas by transformers. Tests compare the numpy reference with these logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import models
import numpy as np
import torch
import transformers
from installed import DATA
from torch import Tensor
from torch_engram import with_engram
from torch_model import torch_logits

from stem_edge.config import ModelConfig
from stem_edge.numerics.quantize import F32
from stem_edge.special import dense_twin

LAST = 16  # positions that are stored
FILE = DATA / "blackbox.npz"


def row_of(config: ModelConfig, ids: Sequence[int], order: int, size: int) -> int:
    """Row of a table that the last of some ids looks up; ids before an end, or the text, are 0."""
    total = ids[-1]
    for distance in range(1, order):
        seen = ids[-1 - distance :]
        known = len(seen) > distance and config.ngram_end not in seen[:-1]
        total += (seen[0] if known else 0) * pow(config.vocab_size, distance)
    return total % size


def with_ngrams(
    config: ModelConfig, tensors: dict[str, Tensor], tables: Tensor, ids: list[int]
) -> Tensor:
    """The embeddings [T, D] of ids, each averaged with the projected rows of its n-grams."""
    parts = tables.split(list(config.ngram_sizes))
    projects = tensors["layers.0.project"].chunk(len(parts), dim=1)
    x = tensors["embedding"][ids]
    for number, (table, project) in enumerate(zip(parts, projects, strict=True)):
        order = 2 + number // (len(parts) // (config.ngram_order - 1))
        rows = [row_of(config, ids[: at + 1], order, len(table)) for at in range(len(ids))]
        x = x + table[rows] @ project.T
    return x / (1 + len(parts))


def of_stem(name: str, ids: list[int]) -> Tensor:
    """Logits [T, V] of a STEM model by torch."""
    config, arrays, stored = models.stem_model(name)
    tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
    tables = {layer: torch.from_numpy(value) for layer, value in stored.items()}
    twin = dense_twin(config) if config.ngram_order else config
    if config.stem_ffn == "engram":
        before = with_engram(config, tensors, tables[config.row_layers[0]], ids)
        return torch_logits(twin, tensors, {}, ids, before=before)
    if config.stem_ffn == "ngrams":
        mixed = tensors | {"embedding": with_ngrams(config, tensors, tables[0], ids)}
        return torch_logits(twin, mixed, {}, [*range(len(ids))])
    if config.n_experts:
        index = torch.from_numpy(models.expert_of_token(config))
        tables = {layer: table[index] for layer, table in tables.items()}
    return torch_logits(config, tensors, tables, ids)


def of_gemma(name: str, ids: list[int]) -> Tensor:
    """Logits [T, V] of a Gemma by transformers."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = models.write_checkpoint(name, Path(folder) / name)
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(path, attn_implementation="eager", dtype=torch.float32).eval()
        found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


def main() -> None:
    """Compute all, and write the file."""
    found: dict[str, F32] = {}
    for name in models.KINDS:
        if name not in ("phone", "demo"):  # which have files of their own
            ids = models.prompts(name)[0]
            logits = of_stem(name, ids) if name in models.STEM else of_gemma(name, ids)
            found[name] = logits[-LAST:].numpy()
    np.savez_compressed(FILE, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
