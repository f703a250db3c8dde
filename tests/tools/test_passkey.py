"""tools/demo/passkey.py: texts that hide a key, rows to train on, and answers of a trained model.

tests/data/passkey holds a checkpoint by tools/demo/train_passkey.py, in float16 to halve the files.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import train_passkey
from demo_tokenizer import DemoTokenizer
from installed import DATA, DEMO, add_ggml, needs_ggml
from passkey import Cell, Questions, main, measure, parse_options, report
from passkey_rows import Rows
from passkey_text import DIGITS, KEY, QUESTION, Haystack, tokenizer_text

from stem_edge import export_bundle
from stem_edge.export.checkpoints.hugging_face import read_checkpoint
from stem_edge.graph.formats import EngineName
from stem_edge.graph.kv import KV_TYPES, KvType

CHECKPOINT = DATA / "passkey"
QUESTIONS = Questions(lengths=(128, 700), depths=(0, 0.5, 1), samples=1)
LOAD: dict[str, Any] = {"trial": False, "warm_start": False, "threads": 1}


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_text_is_as_long_as_asked_and_has_one_key_at_its_depth(depth: float) -> None:
    text, key = Haystack(words, seed=3).text(500, depth)
    longest = 12  # words of a sentence
    assert 500 - longest < words(text) <= 500
    assert text.endswith(QUESTION)
    before, after = text.removesuffix(QUESTION).split(KEY.format(key).strip())
    assert len(key) == DIGITS == len(set(key))
    assert key not in before + after
    assert words(before) == pytest.approx(depth * words(before + after), abs=longest)


def test_a_seed_chooses_the_texts() -> None:
    one, same, other = (Haystack(words, seed).text(90, 0.5) for seed in (1, 1, 2))
    assert one == same != other


def test_rows_end_in_their_key_and_have_gaps_only_around_it() -> None:
    tokenizer = DemoTokenizer([tokenizer_text(300, 1)], 400)
    rows = Rows(tokenizer, seed=1)
    tokens, positions = rows.batch(64, context=5000)
    for ids, places in zip(tokens.tolist(), positions.tolist(), strict=True):
        key = tokenizer.decode(ids[-rows.answer :]).strip()
        hidden = tokenizer.encode(KEY.format(key))
        at = next(i for i in range(64) if ids[i : i + len(hidden)] == hidden)
        steps = [b - a for a, b in itertools.pairwise(places)]
        apart = {i + 1 for i, step in enumerate(steps) if step != 1}
        assert ids[0] == tokenizer.bos and places[0] == 0 and places[-1] < 5000
        assert min(steps) == 1 and apart <= {at, at + len(hidden)}
    assert max(positions[:, -1]) > 2500
    assert rows.batch(64, context=0)[1].tolist() == [list(range(64))] * len(tokens)


def test_every_digit_is_a_token() -> None:
    tokenizer = DemoTokenizer([tokenizer_text(300, 1)], 400)
    for text, count in ((" 40213", DIGITS + 1), (KEY.format(""), 10), (QUESTION, 8)):
        assert len(tokenizer.encode(text)) == count


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passkey")
    calibration, out = folder / "train.txt", folder / "bundle"
    text, key = Haystack(words, seed=9).text(400, 0.5)
    calibration.write_text(f"{text} {key}.")
    export_bundle(CHECKPOINT, out, calibration=calibration)
    add_ggml(CHECKPOINT, out)
    return out


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def test_a_trained_model_finds_every_key_with_each_type_of_keys_and_values(
    engine: EngineName, kv: KvType, bundle: Path
) -> None:
    found = list(measure(bundle, [kv], QUESTIONS, engine=engine, **LOAD))
    cells = itertools.product([engine], [kv], QUESTIONS.lengths, QUESTIONS.depths, [1], [1])
    assert found == list(itertools.starmap(Cell, cells))


def test_a_model_that_knows_no_keys_finds_none() -> None:
    questions = Questions(lengths=(256,), depths=(0, 1), samples=1)
    found = measure(DEMO, ["fp32"], questions, **LOAD)
    assert [(cell.right, cell.asked) for cell in found] == [(0, 1)] * 2


FOUND = [
    Cell("ggml", kv, length, depth, right=int(4 * depth), asked=4)
    for kv in ("fp16", "int8")
    for length in (256, 1024)
    for depth in (0.5, 1)
]


def test_the_report_has_a_row_for_each_type_and_length() -> None:
    assert report(FOUND) == [
        "engine  K/V   tokens  50%  100%   all",
        "ggml    fp16     256   50   100  75.0",
        "ggml    fp16   1,024   50   100  75.0",
        "ggml    int8     256   50   100  75.0",
        "ggml    int8   1,024   50   100  75.0",
    ]


def test_the_command_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("passkey.measure", lambda *_, **__: iter(FOUND))
    plot, figures = tmp_path / "found.png", tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["passkey.py", str(DEMO), "--json", str(figures), "--plot", str(plot)]
    )
    main()
    assert capsys.readouterr().out.splitlines() == report(FOUND)
    assert msgspec.json.decode(figures.read_bytes(), type=list[Cell]) == FOUND
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", [["--lengths", "63"], ["--samples", "0"], ["--depths", "101"], ["--lengths", "x"]]
)
def test_wrong_arguments_are_usage_errors(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["passkey.py", str(DEMO), *arguments])
    with pytest.raises(SystemExit, match="2"):
        parse_options()
    assert "lengths" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_leaves_a_checkpoint_and_texts_with_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train_passkey.py", str(tmp_path / "out"), "--steps", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    train_passkey.main()
    checkpoint = read_checkpoint(tmp_path / "out" / "checkpoint")
    assert checkpoint.config.stem_layers == (1,)
    assert checkpoint.config == read_checkpoint(CHECKPOINT).config
    text = (tmp_path / "out" / "train.txt").read_text()
    answered = re.findall(r"The key is (\d+)\. .* The key is \1\.", text)
    assert len(answered) == train_passkey.EXAMPLES
    assert text.count(QUESTION) == train_passkey.EXAMPLES
