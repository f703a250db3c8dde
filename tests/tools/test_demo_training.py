"""tools/demo/train_demo.py, on countries and on other texts."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_corpus import read_corpus, split
from demo_model import DemoConfig, DemoModel, shares_of_last
from demo_training import Budget, shares_done, train
from train_demo import RECIPE, TEXT_RECIPE, main, parse_options

from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.export.checkpoints.readers import read_checkpoint as read_any_checkpoint
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.numerics.reference import forward, trailing_means, window_starts

pytestmark = pytest.mark.slow

DEMO_RECIPE = replace(RECIPE, batch_tokens=512)
WORDS = ["the", "water", "of", "life", "is", "clear", "and", "the", "ground", "below", "is", "dark"]
TINY = ["--dim", "128", "--layers", "2", "--vocab", "300"]


def prose(numbers: range) -> str:
    """A paragraph of some 500 characters for each number."""
    turned = ([*WORDS[i % 12 :], f"({i})", *WORDS[: i % 12]] for i in numbers)
    return "\n\n".join(" ".join(words * 8) for words in turned) + "\n"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    threads = ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *map(str, arguments), *threads])


def test_a_model_of_texts_is_written_with_its_held_out_perplexity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("rounding in training")

    monkeypatch.setattr("demo_training.logits_with_int4", refuse)
    monkeypatch.setattr("train_demo.TEXT_RECIPE", replace(TEXT_RECIPE, batch_tokens=512))
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for text, numbers in zip(texts, (range(30), range(30, 60)), strict=True):
        text.write_text(prose(numbers))
    out = tmp_path / "out"
    command(monkeypatch, out, "--text", *texts, *TINY, "--steps", 12)
    main()
    checkpoint = read_checkpoint(out / "checkpoint")
    assert checkpoint.config.stem_layers == (1,)
    report = json.loads((out / "report.json").read_text())
    assert report["vocabulary"] == checkpoint.tables[1].shape[0] <= 300 + 256
    assert report["table_parameters"] == math.prod(checkpoint.tables[1].shape)
    assert (report["steps"], report["seen_tokens"]) == (12, 12 * 512)
    assert report["texts"] == [str(text) for text in texts]
    assert 1 < report["heldout_perplexity"]["fp32"] < report["vocabulary"] / 4
    heldout = (out / "heldout.txt").read_text()
    assert heldout.strip()
    assert heldout.strip() not in (out / "train.txt").read_text()


def test_means_of_rows_stay_in_their_documents() -> None:
    ids, end = [5, 3, 9, 9, 2, 3, 9, 4], 9
    rows = np.random.default_rng(0).standard_normal((len(ids), 4), np.float32)
    shares = shares_of_last(torch.tensor([ids]), 3, end)[0].numpy()
    expected = trailing_means(rows, window_starts(ids, 3, [end]))
    assert np.abs(shares @ rows - expected).max() < 1e-6


@pytest.mark.parametrize("window", [0, 4])
def test_both_layouts_hold_the_same_model(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_demo.TEXT_RECIPE", replace(TEXT_RECIPE, batch_tokens=512))
    text = tmp_path / "text.txt"
    text.write_text(prose(range(60)))
    logits = []
    for layout in ("lingua", "safetensors"):
        command(monkeypatch, tmp_path / layout, "--text", text, *TINY, "--steps", 2)
        sys.argv += ["--format", layout, "--stem-window", str(window), "--fp32"]
        main()
        if layout == "safetensors":
            (tmp_path / layout / "checkpoint" / "tokenizer.model").unlink()  # not needed
        found = read_any_checkpoint(tmp_path / layout / "checkpoint")
        assert found.config.row_window == window
        tokens = convert_tokenizer(found.tokenizer.kind, found.tokenizer.path, add_bos=True)
        assert (tokens.bos_id, tokens.eos_ids) == (300, (301,))
        logits.append(forward(found.config, found.backbone, found.rows, [5, 70, 5, 260]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


def test_a_budget_is_steps_or_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(shares_done(Budget(4))) == [0, 0.25, 0.5, 0.75]
    times = iter([100.0, 100.0, 102.5, 109.0, 110.0])
    monkeypatch.setattr("demo_training.time.monotonic", lambda: next(times))
    assert list(shares_done(Budget(1, 10.0))) == [0, 0.25, 0.9]


def fitted(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DemoModel(DemoConfig(vocab_size=128, n_layers=2, stem_layers=(1,)))
    assert train(model, [list(range(128))] * 40, DEMO_RECIPE, Budget(steps), seed=3) == steps
    return model.state_dict()


def test_the_same_seed_trains_the_same_demo() -> None:
    one, other = (fitted(5) for _ in range(2))
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


@pytest.mark.parametrize("gap", ["\n\n", "\n", " ", ""])
def test_a_text_is_cut_into_documents_and_nothing_is_lost(gap: str) -> None:
    text = gap.join(f"{i}:" + "é" * (i % 700) for i in range(300))
    documents = split(text)
    assert "".join("".join(documents).split()) == "".join(text.split())
    assert max(map(len, documents)) <= 8002
    assert len(documents) < len(text) / 3900 + 1
    if gap == "\n\n":
        assert all(document.endswith(("é", "0:")) for document in documents)
        assert sum(document[0].isdigit() for document in documents) == len(documents)


def test_one_document_in_fifty_is_held_out(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(prose(range(900)))
    corpus = read_corpus([tmp_path / "one", tmp_path / "two"])
    assert len(corpus.heldout) == math.ceil((len(corpus.training) + len(corpus.heldout)) / 50)
    assert len(corpus.heldout) > 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text.txt: No such file or directory"),
        (b"", "text.txt: the file holds no text"),
        (b" \n\n ", "text.txt: the file holds no text"),
        (b"abc\xff", "text.txt: not UTF-8 at byte 3"),
        (b"One document.\n", "too short: it is a single document"),
        (b"ab\n\n" * 3000, "too short: 4"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_refused(
    content: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    command(monkeypatch, tmp_path / "out", "--text", tmp_path / "text.txt", *TINY)
    with pytest.raises(SystemExit, match=message):
        main()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--minutes", "5"], "need --text"),
        (["--vocab", "500"], "need --text"),
        (["--text", "a", "--minutes", "0"], "--minutes must be above 0"),
        (["--text", "a", "--minutes", "inf"], "--minutes must be above 0"),
        (["--text", "a", "--minutes", "5", "--steps", "5"], "exclude each other"),
        (["--text", "a", "--dim", "320"], "--dim must be a multiple of 128"),
        (["--text", "a", "--layers", "1"], "--layers must be at least 2"),
        (["--text", "a", "--vocab", "255"], "--vocab must be at least 256"),
    ],
)
def test_wrong_arguments_are_usage_errors(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(monkeypatch, "/nowhere/out", *arguments)
    with pytest.raises(SystemExit) as caught:
        parse_options()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
