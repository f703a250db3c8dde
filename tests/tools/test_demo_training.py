"""tools/demo: training the demo and saving it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_checkpoint import save_checkpoint
from demo_model import DemoConfig, DemoModel
from demo_tokenizer import DemoTokenizer
from demo_training import train
from train_demo import RECIPE

from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.numerics.reference import forward

pytestmark = pytest.mark.slow

DEMO_RECIPE = replace(RECIPE, batch_tokens=512)


def fitted(steps: int, vocab_size: int = 128) -> DemoModel:
    torch.manual_seed(0)
    model = DemoModel(DemoConfig(vocab_size, n_layers=2, stem_layers=(1,)))
    train(model, [list(range(128))] * 40, DEMO_RECIPE, steps, seed=3)
    return model


def test_the_same_seed_trains_the_same_demo() -> None:
    one, other = (fitted(5).state_dict() for _ in range(2))
    assert all(torch.equal(w, other[name]) for name, w in one.items())


def test_the_demo_ends_its_training_with_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def with_int4(model: DemoModel, tokens: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        logits: torch.Tensor = model(tokens)
        return logits

    monkeypatch.setattr("demo_training.logits_with_int4", with_int4)
    fitted(5)
    assert shapes == [(2, 256)]


def test_a_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    tokenizer = DemoTokenizer(["The water of life is clear, and the ground below is dark."], 256)
    model, ids = fitted(2, tokenizer.vocab_size), [5, 70, 5, 260]
    tokenizer.save(tmp_path / "tokenizer.json")
    save_checkpoint(model, tmp_path, "tiny", seed=0)
    found = read_checkpoint(tmp_path)
    logits: Any = model(torch.tensor([ids]))[0].detach().numpy()
    computed = forward(found.config, found.backbone, found.rows, ids)
    assert np.abs(computed - logits).max() < 1e-4
