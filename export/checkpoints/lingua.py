"""Reads checkpoints of the public STEM trainer, which is built on Meta Lingua.

    params.json  consolidated.pth  consolidated_stem.pth, or stem_shards/stem_model_mp<n>.pt

The trainer's defaults, FFN width and interleaved RoPE are not in the files; they are set here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import (
    Checkpoint,
    TokenizerSource,
    check_shapes,
    module_names,
)
from stem_edge.export.tensor_files.json import Layers, one_line, read_json
from stem_edge.export.tensor_files.tensor import Tensor, joined
from stem_edge.export.tensor_files.torch import load_tensors, named_tensors

PARAMS = "params.json"
BACKBONE = "consolidated.pth"
TABLES = "consolidated_stem.pth"
SHARDS = "stem_shards"
LAYER_NAMES = {
    "attention.wq": "wq",
    "attention.wk": "wk",
    "attention.wv": "wv",
    "attention.wo": "wo",
    "feed_forward.w1": "gate",
    "feed_forward.w2": "down",
    "feed_forward.w3": "up",
    "feed_forward.alpha": "mix",
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
}
TOP_NAMES = {"tok_embeddings": "embedding", "norm": "norm", "output": "head"}
# Prefixes of tensors that are not in the backbone, or repeat the embedding as a tied head.
SKIPPED = ("stem_embeddings.", "rope_embeddings.", "output.tied_module.")
WINDOW = 16  # default of stem_window_size
SHOWN_TABLES = 800  # largest number of characters about tables in a message


class Params(msgspec.Struct):
    """Key `model` of params.json, with the trainer's own defaults."""

    dim: int = 512
    n_layers: Layers = 8
    head_dim: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    ffn_dim_multiplier: float | None = None
    multiple_of: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_seqlen: int = 1024
    vocab_size: int = -1
    weight_tying: bool = False
    sliding_window: int | None = None
    stem_layers: list[int] | None = None
    stem_embedding_dim: int | None = None
    stem_window_size: int | None = None
    alpha_mode: str | None = None  # only in models that have both w3 and tables

    @property
    def ffn_width(self) -> int:
        """FFN width: 8/3 * dim * ffn_dim_multiplier, rounded up to a multiple of multiple_of."""
        width = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return self.multiple_of * -(-width // self.multiple_of)


class TokenizerParams(msgspec.Struct):
    """Key `data.tokenizer` of params.json."""

    name: str = "bytes"
    path: str | None = None


class DataParams(msgspec.Struct):
    """Key `data` of params.json."""

    tokenizer: TokenizerParams = msgspec.field(default_factory=TokenizerParams)
    add_bos: bool = True


class TrainParams(msgspec.Struct):
    """Keys of params.json that are read. The other keys do not change the model."""

    model: Params
    model_type: str = ""
    data: DataParams = msgspec.field(default_factory=DataParams)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder of the public STEM trainer. Raises CheckpointError."""
    folder = Path(path)
    params = read_json(
        folder / PARAMS,
        "the parameters of the public STEM trainer",
        TrainParams,
        missing="give the folder of one training step or a consolidated folder",
    )
    names = module_names("layers.{}.", params.model.n_layers, TOP_NAMES, LAYER_NAMES)
    backbone = _read_backbone(folder, names)
    listed = params.model.stem_layers
    dense = all(f"layers.{layer}.up" in backbone for layer in range(params.model.n_layers))
    # A dense model is accepted, too, since Lingua itself trains such models.
    default = [] if dense else list(range(1, params.model.n_layers))
    order = default if listed is None else listed
    # The kind of STEM layers follows `forward` in the trainer's stem_dag, not its documentation.
    mixed = any(f"layers.{layer}.mix" in backbone for layer in range(params.model.n_layers))
    plus = params.model.alpha_mode == "sum"
    kind = "stem-plus" if plus else "stem-mix" if mixed else "stem"
    tables = _read_tables(folder, order) if order else {}
    # The trainer's default attention has no window, in training and in its own generation.
    window = params.model.sliding_window
    ignored = f"sliding_window {window} is ignored, as by the trainer"
    checkpoint = Checkpoint(
        path=folder,
        config=_config(folder, params, order, kind, backbone),
        backbone=backbone,
        tables=tables,
        tokenizer=_tokenizer(folder, params.data),
        notes=() if window is None else (ignored,),
        names=names,
    )
    return check_shapes(checkpoint)


def _read_backbone(folder: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Open the backbone's tensors. names: trainer's -> this project's; other names do not change."""
    path = folder / BACKBONE
    if not path.is_file():
        listed = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise CheckpointError(
            f"{folder}: no {BACKBONE}, found {listed}; make it of a distributed checkpoint with python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} {path}"
        )
    state = load_tensors(path)
    found = named_tensors(path, state.get("model", state), SKIPPED)
    modules = {n.removesuffix(".weight"): m for n, m in found.items()}
    return {names.get(module, module): matrix for module, matrix in modules.items()}


def _read_tables(folder: Path, order: list[int]) -> dict[int, Tensor]:
    """Return STEM layer -> table. order: stem_layers of params.json; layer order[i] has table i."""
    whole = folder / TABLES
    files = [whole] if whole.is_file() else _shard_files(folder)
    states = [_table_shards(path, len(order)) for path in files]
    tables: dict[int, Tensor] = {}
    for layer, *shards in zip(order, *states, strict=True):
        if len({shard.shape[0] for shard in shards}) > 1:
            raise CheckpointError(
                f"{folder / SHARDS}: {shards[0].name} has other rows in another shard; the files are of "
                "different runs: copy all of one"
            )
        tables[layer] = joined(shards, axis=1)
    return tables


def _table_shards(path: Path, count: int) -> list[Tensor]:
    """Return the `count` tables in a file. In a shard's file, they have only some columns."""
    found = named_tensors(path, load_tensors(path))
    names = [f"stem_embeddings.{number}.weight" for number in range(count)]
    if missing := [name for name in names if name not in found or len(found[name].shape) != 2]:
        raise CheckpointError(
            f"{path}: no table {one_line(', '.join(missing), SHOWN_TABLES)}; found "
            f"{one_line(', '.join(sorted(found)[:4]) or 'nothing')}: the file does not belong to "
            "this model; check that all files are from the same run"
        )
    return [found[name] for name in names]


def _shard_files(folder: Path) -> list[Path]:
    """List the files with column shards of the tables, in numeric order (mp10 after mp9)."""
    found = {path.name for path in (folder / SHARDS).glob("stem_model_mp*.pt")}
    names = [f"stem_model_mp{number}.pt" for number in range(max(1, len(found)))]
    if missing := [name for name in names if name not in found]:
        raise CheckpointError(
            f"{folder}: no {TABLES}, and of its shards {SHARDS}/stem_model_mp<n>.pt {len(found)} are "
            f"there, but not {missing[0]}; copy all of them"
        )
    return [folder / SHARDS / name for name in names]


def _config(
    folder: Path,
    params: TrainParams,
    order: list[int],
    kind: str,
    backbone: Mapping[str, Tensor],
) -> ModelConfig:
    model, window = params.model, params.model.stem_window_size
    if params.model_type.endswith("_window"):
        window = window or WINDOW
    if model.n_heads is None and model.head_dim is None:
        raise CheckpointError(f"{folder / PARAMS}: has neither n_heads nor head_dim; add one")
    try:
        heads = model.n_heads or model.dim // (model.head_dim or 1)
        embedding = backbone.get("embedding")
        vocabulary = embedding.shape[0] if model.vocab_size < 1 and embedding else model.vocab_size
        return ModelConfig(
            vocab_size=vocabulary,
            dim=model.dim,
            n_layers=model.n_layers,
            n_heads=heads,
            n_kv_heads=model.n_kv_heads or heads,
            head_dim=model.head_dim or model.dim // heads,
            d_ff=model.stem_embedding_dim or model.ffn_width,
            stem_layers=tuple(sorted(order)),
            stem_ffn=kind,
            row_window=window if order and window and window > 1 else 0,
            norm_eps=model.norm_eps,
            rope_theta=model.rope_theta,
            max_context=model.max_seqlen,
            tied_head=model.weight_tying,
        )
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder / PARAMS}: {error}") from error


def _tokenizer(folder: Path, data: DataParams) -> TokenizerSource:
    """Return the tokenizer that params.json names: at its path, or in the checkpoint's folder."""
    path = Path(data.tokenizer.path) if data.tokenizer.path else None
    if path is not None and not path.is_file():
        path = folder / path.name if not (folder / path).is_file() else folder / path
    return TokenizerSource(data.tokenizer.name, path, data.add_bos)
