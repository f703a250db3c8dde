"""Fit the table rows of a few tokens to sentences; all the rest of the model stays as it is.

Shapes: K tokens whose rows are fitted, in N of the STEM layers; F = d_ff; V = vocabulary; B
sentences of at most T tokens. Losses are in nats a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from demo_model import DemoConfig, DemoModel
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from stem_edge.errors import CheckpointError
from stem_edge.export.lingua import LAYER_NAMES, TOP_NAMES
from stem_edge.export.readers import read_checkpoint
from stem_edge.quantize import F32

IGNORED = -100  # targets that functional.cross_entropy leaves out


class Sentence(NamedTuple):
    """Token ids, of which those from place `answer` on are the answer."""

    token_ids: list[int]
    answer: int


@dataclass(frozen=True)
class Fitting:
    """How rows are fitted."""

    layers: tuple[int, ...]  # STEM layers whose rows change
    steps: int = 200
    learning_rate: float = 0.03
    keep: float = 1.0  # weight of the divergence of kept sentences from what they were


class Fitted(NamedTuple):
    """Rows of each token, float32 [K, N, F], and the loss before each step."""

    tokens: tuple[int, ...]
    rows: F32
    losses: list[float]


def read_model(path: Path) -> DemoModel:
    """The float32 model of a checkpoint that train_demo.py wrote. Raises CheckpointError."""
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    model = DemoModel(
        DemoConfig(
            vocab_size=config.vocab_size,
            dim=config.dim,
            n_layers=config.n_layers,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            stem_layers=config.stem_layers,
            multiple_of=config.d_ff,
            max_seqlen=config.max_context,
            rope_theta=config.rope_theta,
            norm_eps=config.norm_eps,
        )
    )
    matrices = {_trained_name(name): matrix for name, matrix in checkpoint.backbone.items()}
    for number, layer in enumerate(config.stem_layers):
        matrices[f"stem_embeddings.{number}.weight"] = checkpoint.tables[layer]
    state = {name: torch.tensor(m.rows(0, m.shape[0])) for name, m in matrices.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: not a model of tools/demo/train_demo.py ({error}); give one that it wrote"
        ) from error
    return model.requires_grad_(False).eval()


def _trained_name(name: str) -> str:
    """The trainer's name of a tensor that has this one in stem_edge."""
    if not name.startswith("layers."):
        return {ours: theirs for theirs, ours in TOP_NAMES.items()}.get(name, name) + ".weight"
    _, layer, own = name.split(".", 2)
    theirs = {ours: theirs for theirs, ours in LAYER_NAMES.items()}.get(own, own)
    return f"layers.{layer}.{theirs}.weight"


class _Batch(NamedTuple):
    tokens: Tensor  # [B, T], 0 where a sentence has ended
    answers: Tensor  # [B, T], IGNORED where no answer is
    is_token: Tensor  # [B, T] bool


def fit_rows(
    model: DemoModel,
    tokens: Sequence[int],
    taught: Sequence[Sentence],
    kept: Sequence[Sentence],
    fitting: Fitting,
    like: Sequence[int] = (),
) -> Fitted:
    """Rows of `tokens` with which the answers of `taught` come, and all of `kept` as before.

    Starts from the mean row of the tokens `like`, without them from the rows that `tokens` have.
    The same arguments give the same rows. Raises ValueError without a sentence to be taught.
    """
    numbers = [model.config.stem_layers.index(layer) for layer in fitting.layers]
    tables, ids = [model.tables()[number] for number in numbers], torch.tensor(tokens)
    rows = _start(tables, tokens, like).requires_grad_()
    batch, others = _padded(taught), _padded(kept) if kept else None
    before = model(others.tokens).log_softmax(-1) if others else None
    optimizer = torch.optim.Adam([rows], lr=fitting.learning_rate)
    losses = []
    for _ in range(fitting.steps):
        weights = {
            f"stem_embeddings.{number}.weight": table.index_put((ids,), row)
            for number, table, row in zip(numbers, tables, rows, strict=True)
        }
        loss = _answer_loss(functional_call(model, weights, (batch.tokens,)), batch)
        if others is not None and before is not None:
            now = functional_call(model, weights, (others.tokens,)).log_softmax(-1)
            loss = loss + fitting.keep * _divergence(before, now, others.is_token)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Fitted(tuple(tokens), rows.detach().transpose(0, 1).numpy(), losses)


def _start(tables: Sequence[Tensor], tokens: Sequence[int], like: Sequence[int]) -> Tensor:
    """Rows [N, K, F] to begin with."""
    if not like:
        return torch.stack([table[list(tokens)] for table in tables])
    means = [table[list(like)].mean(0) for table in tables]
    return torch.stack([mean.repeat(len(tokens), 1) for mean in means])


def _padded(sentences: Sequence[Sentence]) -> _Batch:
    length = max(len(sentence.token_ids) for sentence in sentences)
    tokens = torch.zeros(len(sentences), length, dtype=torch.long)
    answers, is_token = torch.full_like(tokens, IGNORED), tokens.bool()
    for row, (ids, answer) in enumerate(sentences):
        tokens[row, : len(ids)] = torch.tensor(ids)
        answers[row, answer : len(ids)] = torch.tensor(ids[answer:])
        is_token[row, : len(ids)] = True
    return _Batch(tokens, answers, is_token)


def _answer_loss(logits: Tensor, batch: _Batch) -> Tensor:
    """Cross entropy of the answers, given logits [B, T, V]."""
    predicted, wanted = logits[:, :-1].flatten(0, 1), batch.answers[:, 1:].flatten()
    return functional.cross_entropy(predicted, wanted, ignore_index=IGNORED)


def _divergence(before: Tensor, now: Tensor, is_token: Tensor) -> Tensor:
    """Mean KL divergence of log probabilities [B, T, V] from what they were, at real tokens."""
    each = (before.exp() * (before - now)).sum(-1)
    return each[is_token].mean()
