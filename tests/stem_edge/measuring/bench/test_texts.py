"""Texts of four kinds: whole tasks, cut to a context, by the bundle's tokens or by words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from installed import DEMO

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.speculation import (
    FIRST_WORD,
    KINDS,
    PIECE,
    Coder,
    _texts,
    read_tasks,
)
from stem_edge.measuring.workload import DEFAULT_TEXT
from stem_edge.runtime.text.codec import TextCodec

LARGE = 128_256


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(DEMO)


def test_every_kind_has_tasks_of_prompt_and_answer(bundle: Bundle) -> None:
    tasks = read_tasks(bundle, context_length=100_000, new_tokens=50_000)
    assert tuple(tasks) == KINDS
    codec = TextCodec(bundle.file(TOKENIZER))
    every = [task for kind in tasks.values() for task in kind]
    first, prose = every[0], every[-1]
    assert codec.decode(first.prompt).startswith("Correct the spelling")
    assert codec.decode(first.answer).startswith("The ferry to the northern islands")
    assert codec.decode(prose.prompt + prose.answer) == DEFAULT_TEXT.read_text("utf-8")
    assert all("###" not in codec.decode(task.prompt + task.answer) for task in every)


@pytest.mark.parametrize(
    ("given", "prompt", "answer"),
    [
        ({}, 128, 128),  # the demo's context is 256
        ({"context_length": 100}, 50, 50),
        ({"context_length": 100, "new_tokens": 20}, 80, 20),
        ({"prompt_tokens": 10, "new_tokens": 5}, 10, 5),
    ],
)
def test_prompts_lose_their_beginning_and_answers_their_end(
    bundle: Bundle, given: dict[str, int], prompt: int, answer: int
) -> None:
    whole = read_tasks(bundle, context_length=100_000, new_tokens=50_000)
    found = read_tasks(bundle, **given)  # type: ignore[arg-type]
    pairs = [pair for kind in KINDS for pair in zip(found[kind], whole[kind], strict=True)]
    for task, all_of_it in pairs:
        assert len(task.prompt) == min(prompt, len(all_of_it.prompt))
        assert task.prompt == all_of_it.prompt[-prompt:]
        assert task.answer == all_of_it.answer[:answer]
        assert len(task.answer) == answer


@pytest.mark.parametrize("given", [{"new_tokens": 0}, {"prompt_tokens": 0}, {"context_length": 1}])
def test_no_room(bundle: Bundle, given: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected at least 1 of each"):
        read_tasks(bundle, **given)  # type: ignore[arg-type]


def test_a_file_is_a_kind_of_its_own(bundle: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "own.npy", np.arange(50))
    found = read_tasks(bundle, tmp_path / "own.npy", prompt_tokens=30)
    assert found == {"own.npy": [(list(range(30)), list(range(30, 50)))]}


def test_words_stand_for_tokens_where_only_bytes_are_known(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextCodec, "encode", lambda self, text, **_: list(text.encode()))
    codec = TextCodec(bundle.file(TOKENIZER))
    ids = Coder(codec, LARGE)
    one, two = ids.of("the tide and the boat"), ids.of(" the boat")
    assert len(one) == 5 and one[-2:] == two  # a word has the same id wherever it stands
    assert len({*one}) == 5  # "the" at the beginning has no space
    assert all(FIRST_WORD <= token < LARGE for token in one)
    assert Coder(codec, 300).of("the") == list(b"the")


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_the_whole_text(kind: str) -> None:
    for prompt, answer in _texts(kind):
        assert "".join(PIECE.findall(prompt + answer)) == prompt + answer
