"""Opens only the n-gram tables in the checkpoint of a large model.

| model | tensors of a table |
|---|---|
| Qwen3.8-Flash-Next | `...layers.L.ple.ple_embedding.ngram_embedding.shard_I.weight`, or one `.weight`; fp8 has one `.weight_scale` |
| DeepSeek-V4.1 | `layers.L.engram.embed.weight`, fp8; `.scale` holds the scales' exponents, one for 32 values |
| LongCat | `model.ngram_embeddings.embedders.I.weight`, one for each head |
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.json import read_json
from stem_edge.export.tensor_files.safetensors import open_folder
from stem_edge.export.tensor_files.tensor import Tensor, bytes_of
from stem_edge.numerics.quantize import U8
from stem_edge.tables.ngrams.rows import NgramTable, Stored
from stem_edge.tables.ngrams.schemes import keyed_tables

CONFIG = "config.json"
STORED: dict[str, Stored] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8"}
WEIGHTS = re.compile(
    r".*\blayers\.(?P<ple>\d+)\.ple\.ple_embedding\.ngram_embedding(\.shard_(?P<shard>\d+))?\.weight"
    r"|.*\blayers\.(?P<engram>\d+)\.engram\.embed\.weight"
    r"|.*\bngram_embeddings\.embedders\.(?P<head>\d+)\.weight"
)
SCALES = (".weight_scale", ".scale")  # in place of a tensor's `.weight`


@dataclass(frozen=True)
class StoredRows:
    """Rows of an n-gram table as the checkpoint stores them, in one or more tensors."""

    table: NgramTable
    weights: Sequence[Tensor]  # [rows, width] each
    scales: Sequence[Tensor]  # [rows, blocks] each; (): none

    def read(self, start: int, stop: int) -> U8:
        """Read rows start..stop as stored bytes [n, row_nbytes]. Raises CheckpointError."""
        starts = [0, *accumulate(tensor.shape[0] for tensor in self.weights)]
        pieces, at = list[U8](), start
        while at < stop:
            part = bisect_right(starts, at) - 1
            end = min(stop, starts[part + 1])
            span = at - starts[part], end - starts[part]
            both = [bytes_of(group[part], *span) for group in (self.weights, self.scales) if group]
            pieces.append(np.concatenate(both, axis=1))
            at = end
        rows = np.concatenate(pieces)
        if not np.isfinite(self.table.values(rows)).all():
            raise CheckpointError(
                f"{self.weights[0].path}: rows {start} to {stop} of table {self.table.name} hold a "
                "value that is not finite; the file is damaged: copy it again"
            )
        return rows


def open_tables(folder: Path) -> list[StoredRows]:
    """Open the n-gram tables in a Hugging Face folder. Raises CheckpointError.

    The folder needs only config.json, the index, and the files that hold the tables.
    """
    path = folder / CONFIG
    config = read_json(path, "a model's config.json", dict[str, Any])
    try:
        tables = keyed_tables(config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; only models with such tables are read") from error
    tensors = open_folder(folder, is_table)
    return [_stored(folder, table, tensors) for table in tables]


def is_table(name: str) -> bool:
    scaled = (name.removesuffix(s) + ".weight" for s in SCALES if name.endswith(s))
    return any(WEIGHTS.fullmatch(weight) for weight in (name, *scaled))


def _stored(folder: Path, table: NgramTable, tensors: dict[str, Tensor]) -> StoredRows:
    parts = dict[int, Tensor]()
    for name, tensor in tensors.items():
        if (found := WEIGHTS.fullmatch(name)) is None:
            continue
        layer = found["ple"] or found["engram"]
        if (None if layer is None else int(layer)) == table.layer:
            parts[int(found["shard"] or found["head"] or 0)] = tensor
    weights = [parts[number] for number in sorted(parts)]
    _check(folder, table, weights)
    return _with_scales(table, weights, tensors)


def _check(folder: Path, table: NgramTable, weights: list[Tensor]) -> None:
    """Raise CheckpointError unless `weights` together hold all rows of the table."""
    rows = sum(tensor.shape[0] for tensor in weights)
    if not weights or rows < table.hash.rows:
        raise CheckpointError(
            f"{folder}: {rows} rows of the table {table.name} in {len(weights)} tensors; its keys "
            f"need {table.hash.rows}: copy all files that hold it"
        )
    for tensor in weights:
        if tensor.dtype not in STORED or tensor.shape[1:] != (table.width,):
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} is {tensor}; expected [rows, {table.width}] of "
                f"{', '.join(STORED)}"
            )
    sizes = [tensor.shape[0] for tensor in weights]
    if table.layer is None and sizes != list(table.hash.sizes):
        raise CheckpointError(
            f"{folder}: heads of {sizes} rows; config.json says {table.hash.sizes}"
        )


def _with_scales(
    table: NgramTable, weights: list[Tensor], tensors: dict[str, Tensor]
) -> StoredRows:
    stored, scale, block = STORED[weights[0].dtype], 1.0, 0
    scales = [s for tensor in weights if (s := _scale_of(tensor, tensors)) is not None]
    shared = len({one.name for one in scales}) == 1 and scales[0].shape in ((), (1,))
    if shared:  # one scale for the whole table
        scale, scales = float(scales[0].rows(0, 1).reshape(-1)[0]), []
    elif scales:
        block = table.width // max(1, scales[0].shape[-1])
        wanted = [(tensor.shape[0], table.width // block) for tensor in weights]
        if [s.shape for s in scales] != wanted or {s.dtype for s in scales} != {"F8_E8M0"}:
            raise CheckpointError(
                f"{scales[0].path}: {scales[0].name} is {scales[0]}; expected {list(wanted[0])} of F8_E8M0"
            )
    if stored == "fp8" and not shared and not scales:
        raise CheckpointError(f"{weights[0].path}: {weights[0].name} has 8 bits and no scale")
    kept = msgspec.structs.replace(table, stored=stored, block=block, scale=scale)
    return StoredRows(kept, weights, scales)


def _scale_of(weight: Tensor, tensors: dict[str, Tensor]) -> Tensor | None:
    base = re.sub(r"(\.shard_\d+)?\.weight$", "", weight.name)
    names = [weight.name.removesuffix(".weight") + ending for ending in SCALES]
    names += [base + ending for ending in SCALES]
    return next((tensors[name] for name in names if name in tensors), None)
