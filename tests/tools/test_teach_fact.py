"""tools/demo/teach_fact.py: rows fitted to a fact, on a small random model of countries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import teach_fact
import torch
from demo_checkpoint import save_checkpoint
from demo_facts import NAMING, Country, countries
from demo_model import DemoConfig, DemoModel
from demo_text import Composer
from demo_tokenizer import DemoTokenizer
from edit_cases import CAPITAL, Question, about_others
from teach_fact import (
    Fitted,
    Sentence,
    fit_rows,
    rarest_tokens,
    read_model,
    stated,
    teach,
)

import stem_edge
from stem_edge.edit_files.file import NewRows
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.numerics.reference import forward

# On two threads, so small a model is slower, and beside other tests a hundred times slower.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

ATLANTIS = Country("Atlantis", "Port Victoria", "", "", "", ())
FORMS = NAMING["capital"][:3]
TOKENS = [7, 40]
TAUGHT = [Sentence([3, 7, 9, 11, 12], 3), Sentence([5, 40, 9, 11], 3)]
KEPT = [Sentence([1, 2, 7, 4], 4), Sentence([6, 40, 8, 8, 9], 5)]


class Trained(NamedTuple):
    """A checkpoint and its bundle of exact numbers."""

    checkpoint: Path
    bundle: Path


def random_model(vocab_size: int, seed: int) -> DemoModel:
    torch.manual_seed(seed)
    model = DemoModel(DemoConfig(vocab_size, n_layers=4, stem_layers=(0, 2), max_seqlen=64))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("taught")
    tokenizer = DemoTokenizer(Composer(countries(), 1).training_documents(50), 400)
    save_checkpoint(random_model(tokenizer.vocab_size, 0), folder / "checkpoint", "random", 0)
    tokenizer.save_ranks(folder / "checkpoint" / "tokenizer.model")
    stem_edge.export_bundle(folder / "checkpoint", folder / "bundle", type="fp32", rows="fp32")
    return Trained(folder / "checkpoint", folder / "bundle")


@pytest.fixture
def three_countries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model's answers are long: those about three countries are enough."""
    monkeypatch.setattr("edit_cases.countries", lambda: countries()[:3])


def fit(model: DemoModel, kept: list[Sentence]) -> Fitted:
    return fit_rows(model, TOKENS, TAUGHT, kept, steps=80, learning_rate=0.1)


def logits_with(model: DemoModel, fitted: Fitted, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        before = [table.clone() for table in model.tables()]
        for number, table in enumerate(model.tables()):
            table[list(fitted.tokens)] = torch.tensor(fitted.rows[:, number])
        logits: torch.Tensor = model(torch.tensor([token_ids]))[0]
        for table, own in zip(model.tables(), before, strict=True):
            table.copy_(own)
    return logits


def test_a_checkpoint_is_read_as_the_model_it_is(trained: Trained) -> None:
    checkpoint = read_checkpoint(trained.checkpoint)
    expected = forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, [5, 300, 5, 9])
    model = read_model(trained.checkpoint)
    found = model(torch.tensor([[5, 300, 5, 9]]))[0].numpy()
    assert np.abs(found - expected).max() < 1e-4


def test_a_checkpoint_of_another_kind_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a checkpoint by tools/demo/train_demo\.py"):
        read_model(tiny_checkpoint)


def test_the_loss_falls_and_the_answers_come() -> None:
    model = random_model(64, 0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fitted = fit(model, [])
    assert fitted.losses[-1] < 0.1 * fitted.losses[0]
    for token_ids, answer in TAUGHT:
        found = logits_with(model, fitted, token_ids).argmax(-1).tolist()
        assert found[answer - 1 : -1] == token_ids[answer:]
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert (fitted.tokens, fitted.rows.shape) == ([7, 40], (2, 2, 384))
    assert np.array_equal(fit(model, []).rows, fitted.rows)


def test_kept_sentences_change_less() -> None:
    model = random_model(64, 0)
    moved = []
    for kept in ([], KEPT):
        fitted = fit(model, kept)
        now = logits_with(model, fitted, KEPT[0].token_ids).log_softmax(-1)
        before = model(torch.tensor([KEPT[0].token_ids]))[0].log_softmax(-1)
        moved.append(float((before.exp() * (before - now)).sum(-1).mean()))
    assert moved[1] < moved[0] / 2


def test_the_tokens_are_those_that_others_need_least(trained: Trained) -> None:
    with stem_edge.load(trained.bundle, context_length=64) as model:
        names = [model.tokenize(text, add_special_tokens=False) for text in ("Spain", " Spain")]
        told = [model.tokenize(stated(question)) for question in about_others("Spain")]
        chosen = rarest_tokens(model, Country("Spain", "", "", "", "", ()))
    counts = {token: sum(token in ids for ids in told) for ids in names for token in ids}
    best = {min(counts[token] for token in ids) for ids in names}
    assert {counts[token] for token in chosen} == best
    assert all(set(chosen) & set(ids) for ids in names)


def test_the_edit_gives_the_bundle_the_fitted_rows(trained: Trained, three_countries: None) -> None:
    exact = read_model(trained.checkpoint)
    with stem_edge.load(trained.bundle, context_length=64) as model:
        edit, fitted = teach(model, exact, ATLANTIS, FORMS, steps=5)
        ids = model.tokenize(stated(Question(ATLANTIS, "capital", CAPITAL)))
        others = [token for token in range(50) if token not in fitted.tokens]
        plain = model.logits(others), model.logits(ids)
        with model.edited(edit):
            found, untouched = model.logits(ids), model.logits(others)
    assert fitted.losses[-1] < fitted.losses[0]
    assert np.array_equal(untouched, plain[0])
    with torch.no_grad():
        for number, table in enumerate(exact.tables()):
            table[list(fitted.tokens)] = torch.tensor(fitted.rows[:, number])
        expected = exact(torch.tensor([ids]))[0].numpy()
    assert np.abs(found - expected).max() < 1e-4 < np.abs(found - plain[1]).max()


def test_the_tool_writes_the_edit_and_prints_what_it_did(
    trained: Trained,
    three_countries: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit = tmp_path / "atlantis.edit"
    given = [*map(str, trained), "-o", str(edit), "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["teach_fact.py", *given])
    teach_fact.main()
    printed = capsys.readouterr().out
    assert "| The capital of Atlantis is | " in printed
    assert printed.count("| no |") == 2
    assert "answers changed" in printed
    assert isinstance(stem_edge.read_edit(edit).change, NewRows)
