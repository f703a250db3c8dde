"""Train the demo model on documents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from demo_model import DemoModel, logits_with_int4, next_token_loss
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Recipe:
    """Settings of a training. Fields ending in `_speed` are factors of the learning rate."""

    batch_tokens: int
    row_tokens: int
    learning_rate: float
    embedding_speed: float
    table_speed: float
    finish_share: float  # share of steps at the end, with int4 weights and full rows


def train(
    model: DemoModel, documents: list[list[int]], recipe: Recipe, steps: int, seed: int
) -> None:
    optimizer = make_optimizer(model, recipe)
    peaks = [group["lr"] for group in optimizer.param_groups]
    short, long = (
        batches(packed(documents, length), recipe.batch_tokens, seed)
        for length in (recipe.row_tokens, model.config.max_seqlen)
    )
    for step in (bar := tqdm(range(steps))):
        done = step / steps
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(done)
        is_finish = done >= 1 - recipe.finish_share
        tokens = next(long if is_finish else short)
        logits = logits_with_int4(model, tokens) if is_finish else model(tokens)
        loss = next_token_loss(logits, tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_description_str(f"loss {loss.item():.3f}", refresh=False)


def make_optimizer(model: DemoModel, recipe: Recipe) -> torch.optim.Optimizer:
    rate = recipe.learning_rate
    slow = [model.tok_embeddings.weight]
    tables = model.tables()
    apart = {id(p) for p in slow + tables}
    rest = [p for p in model.parameters() if id(p) not in apart]
    return torch.optim.AdamW(
        [
            {"params": slow, "lr": rate * recipe.embedding_speed, "weight_decay": 0.0},
            {"params": tables, "lr": rate * recipe.table_speed, "weight_decay": 0.0},
            {"params": rest, "lr": rate, "weight_decay": 0.05},
        ],
        betas=(0.9, 0.98),
    )


def schedule(done: float) -> float:
    """Return the learning rate's share of its peak: a short warm-up, then half a cosine to zero."""
    return min(1.0, 0.02 + done / 0.04) * 0.5 * (1 + math.cos(math.pi * done))


def packed(documents: list[list[int]], length: int) -> Tensor:
    """Return all documents' tokens as rows [N, length]; an incomplete last row is dropped."""
    stream = torch.tensor([token for document in documents for token in document])
    return stream[: len(stream) // length * length].view(-1, length)


def batches(rows: Tensor, batch_tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield batches [batch_tokens / T, T] without end; rows [N, T] are shuffled in every pass."""
    generator = torch.Generator().manual_seed(seed)
    size = batch_tokens // rows.shape[1]
    while True:
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[ids] for ids in torch.split(order, size) if len(ids) == size)
