"""Conversations as files: any messages can be saved, by a model that can be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from installed import DEMO

import stem_edge
from stem_edge.errors import InputError

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("before", ["", "Hi", "The capital of Peru is Lima. " * 12])
@pytest.mark.parametrize("messages", [[], [SYSTEM], [{"role": "user", "content": " "}]])
def test_messages_of_no_turn_are_saved(
    before: str, messages: list[dict[str, str]], tmp_path: Path
) -> None:
    with stem_edge.load(DEMO) as model:
        if before:
            model.generate_text(before, max_new_tokens=1)
        path = tmp_path / "talk"
        model.save_conversation(path, model.conversation(messages))
        if messages:
            assert model.load_conversation(path).messages == messages


def test_an_unusable_model_saves_nothing(tmp_path: Path) -> None:
    with stem_edge.load(DEMO) as model:
        conversation = model.conversation([SYSTEM])
        child = os.fork() if hasattr(os, "fork") else -1
        if child == 0:
            try:
                model.save_conversation(tmp_path / "forked", conversation)
            finally:
                os._exit(0)
        if child > 0:
            os.waitpid(child, 0)
    with pytest.raises(InputError, match="closed"):
        model.save_conversation(tmp_path / "closed", conversation)
    assert not any(tmp_path.iterdir())


def test_contexts_for_logits_and_scores_are_counted() -> None:
    ids = [*range(10, 210)]
    with stem_edge.load(DEMO) as model:
        model.generate_text(ids, max_new_tokens=1)
        with model.empty_context(len(ids)):
            assert model._prefixes._nbytes() <= model.plan.kv_cache
            assert len(model._prefixes._lent) == 1
        pieces = model.logits_chunks(ids)
        next(pieces)
        assert len(model._prefixes._lent) == 1
        del pieces
        assert not model._prefixes._lent
