"""Prompts that are kept, in memory and in files, and conversations: what is reused, and never a wrong answer."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from faulty_disk import Failing, watch
from installed import DEMO
from interrupts import interrupted
from models import ORT

import stem_edge
from stem_edge.errors import InputError
from stem_edge.runtime import Model

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
LONG = TEXT * 8


@pytest.fixture
def model() -> Iterator[Model]:
    with stem_edge.load(DEMO, threads=1) as model:
        yield model


def tokens(model: Model, prompt: Any = TEXT, count: int = 12, **options: Any) -> list[int]:
    chunks = model.generate(prompt, max_new_tokens=count, **options)
    return [token for chunk in chunks for token in chunk.token_ids]


def test_figures(model: Model) -> None:
    first = tokens(model)
    assert model.stats.cached_tokens == 0 and "kept" not in model.stats.line()
    assert tokens(model) == first
    stats = model.stats
    assert stats.cached_tokens == (stats.prompt_tokens - 2) // 2 * 2
    assert f"({stats.cached_tokens} kept)" in stats.line()
    assert stats.to_dict()["cached_tokens"] == stats.cached_tokens
    for count in (3, 1, 5, 2):
        assert tokens(model, count=count) == first[:count]


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_are_cut_anywhere(seed: int, shared: Path) -> None:
    """Each has the tokens and the log probabilities of a call that nothing was kept for."""
    rng = np.random.default_rng(seed)
    base, taken = rng.integers(3, 250, 160).tolist(), 0
    options: Any = {"max_new_tokens": 6, "logprobs": 1}
    with stem_edge.load(models.bundle_of("gate", ORT, shared), threads=1, slots=16) as model:
        for _ in range(14):
            kept, more = int(rng.integers(0, 150)), rng.integers(3, 250, rng.integers(1, 20))
            prompt = [*base[:kept], *more.tolist()]
            found = list(model.generate(prompt, **options))
            taken += model.stats.cached_tokens
            with stem_edge.load(model.bundle.path, threads=1, slots=16) as fresh:
                assert list(fresh.generate(prompt, **options)) == found
    assert taken > 200


def test_a_prompt_that_is_interrupted_while_windows_drop_tokens(shared: Path) -> None:
    path, prompt = models.bundle_of("windows", ORT, shared), max(models.prompts("windows"), key=len)
    with stem_edge.load(path, threads=1) as model:

        def answers() -> list[Any]:
            """Of a prompt that begins with tokens that a step of the other one drops, and of that one."""
            options: Any = {"max_new_tokens": 2, "logprobs": 0}
            both = [*prompt[:130], 23, 24, 25], prompt
            return [list(model.generate(one, **options)) for one in both]

        expected = answers()
        for at in range(1000):
            model.forget_prefixes()
            call = partial(tokens, model, prompt, 1)
            ended = not interrupted(call, at, lambda code: "kv_window" in code.co_filename)
            assert answers() == expected
            if ended:
                break
    assert 20 < at < 999


def test_a_file_that_has_more_of_a_prompt_than_memory(shared: Path, tmp_path: Path) -> None:
    """It is read into a context of its own; the one in memory stays for its prompt."""
    path = models.bundle_of("gate", ORT, shared)
    long, cached = np.random.default_rng(5).integers(3, 250, 300).tolist(), list[int]()
    short = [*long[:60], *range(7, 17)]
    with stem_edge.load(path, threads=1) as plain:
        expected = [tokens(plain, prompt) for prompt in (long, short, [*long, 5, 6], short)]
    with stem_edge.load(path, threads=1, prompt_cache=tmp_path) as first:
        assert tokens(first, long) == expected[0]
    with stem_edge.load(path, threads=1, prompt_cache=tmp_path) as model:
        for prompt, answer in zip((short, [*long, 5, 6], short), expected[1:], strict=True):
            assert tokens(model, prompt) == answer
            cached.append(model.stats.cached_tokens)
    assert cached == [0, 300, 68]


def test_edits_and_other_rows_have_prompts_of_their_own(model: Model) -> None:
    """Log probabilities are compared with calls that nothing was kept for."""
    ids = model.tokenize(TEXT)
    others: Any = [*ids[:7], *reversed(ids[7:])]
    edit = stem_edge.make_edit(DEMO, "Spain", "Germany", scope="everywhere")

    def call(stem_ids: Any = None) -> Any:
        return list(model.generate(ids, max_new_tokens=4, logprobs=2, stem_ids=stem_ids))

    def edited() -> Any:
        with model.edited(edit):
            return call()

    calls: list[Callable[[], Any]] = [call, lambda: call(others), edited]
    expected: list[Any] = []
    for one in calls:
        model.forget_prefixes()
        expected.append(one())
    assert expected[0] != expected[1] and expected[0] != expected[2]
    for _ in range(2):
        assert [one() for one in calls] == expected
    assert model.stats.cached_tokens


def test_generators_that_are_open_at_once_or_left(model: Model) -> None:
    expected = tokens(model)
    opened = [model.generate(TEXT, max_new_tokens=12) for _ in range(3)]
    started = [next(one).token_ids for one in opened]
    for ids, one in zip(started[1:], opened[1:], strict=True):
        assert ids + [t for chunk in one for t in chunk.token_ids] == expected
    opened[0].close()
    assert tokens(model) == expected and model.stats.cached_tokens


# ---------------------------------------------------------------- files


def cached(folder: Path, text: str = LONG, **options: Any) -> tuple[list[int], int]:
    """Return an answer of a new process's model, and how many tokens a file gave."""
    with stem_edge.load(DEMO, threads=1, prompt_cache=folder, **options) as model:
        return tokens(model, text, 6), model.stats.cached_tokens


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, list[int]]:
    """The only file of a folder, and the answer to its prompt."""
    answer, taken = cached(tmp_path / "p")
    assert not taken
    (file,) = (tmp_path / "p").iterdir()
    return file, answer


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_link(path: Path) -> None:
    path.parent.rename(path.parent.parent / "elsewhere")
    path.parent.symlink_to(path.parent.parent / "elsewhere")


STRANGE: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(path.rename(path.parent.parent / "elsewhere")),
    "a folder that is a link": folder_link,
    "a pipe": pipe,
    "others can write to it": lambda path: path.chmod(0o666),
    "others can write to the folder": lambda path: path.parent.chmod(0o777),
}
if hasattr(os, "geteuid") and os.geteuid() == 0:
    STRANGE["another user's file"] = lambda path: os.chown(path, 12345, 12345)
    STRANGE["another user's folder"] = lambda path: os.chown(path.parent, 12345, 12345)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX owners and modes")
@pytest.mark.parametrize("kind", STRANGE)
def test_what_may_not_be_ours_is_not_used(kind: str, kept: tuple[Path, list[int]]) -> None:
    """A folder of others costs one warning."""
    STRANGE[kind](kept[0])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        assert cached(kept[0].parent) == (kept[1], 0)
    assert ["prompts are not kept" in str(one.message) for one in said] == [True] * (
        "folder" in kind
    )
    assert os.path.lexists(kept[0])  # nor removed


@pytest.mark.slow
def test_a_full_disk_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said, expected = tmp_path / "p", 0, cached(tmp_path / "q")[0]
    for at in range(9):
        hook = Failing(at, errno.ENOSPC)
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch(patch, ("create", "write", "fsync", "rename"), hook)
            assert cached(folder)[0] == expected
        if caught:  # of other files, nobody needs to know
            said += 1
            assert "prompts are not kept" in str(caught[0].message) and not list(folder.iterdir())
        for file in folder.iterdir():
            file.unlink()
    assert said > 3


def test_conversations_are_saved(model: Model, tmp_path: Path) -> None:
    path, talk = tmp_path / "talk", model.conversation()
    for question in (LONG, "What is the capital of Spain?"):
        list(talk.send(question, max_new_tokens=6))
    model.save_conversation(path, talk)
    expected = [chunk.text for chunk in talk.send("And of Peru?", max_new_tokens=6)]
    with stem_edge.load(DEMO, threads=1) as later:
        loaded = later.load_conversation(path)
        assert loaded.messages == talk.messages[:4]
        assert [chunk.text for chunk in loaded.send("And of Peru?", max_new_tokens=6)] == expected
    content: bytes | None
    for content, problem in (
        *((data, "not a saved conv") for data in (b"{}", b"[" * 10**5, b"9" * 6000, b"\xff", b"5")),
        (None, "cannot read"),
    ):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(InputError, match=problem):
            model.load_conversation(path)
    with pytest.raises(InputError, match="cannot write"):
        model.save_conversation(tmp_path / "none" / "talk", talk)
    model.close()
    for call in (
        lambda: model.save_conversation(path, talk),
        lambda: model.load_conversation(path),
    ):
        with pytest.raises(InputError, match="this model is closed"):
            call()
