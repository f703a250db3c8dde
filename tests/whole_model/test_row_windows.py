"""Models whose rows are means over the last tokens of a document: answers, in every way of computing them.

Each token must be the best one by torch_model.py, which knows the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from answer_ways import NEW, Answers, after_kept, in_turn, together, tokens, with_guesses
from architectures import SIZES, VARIANTS, write
from edit_oracle import swap
from exact_models import export_exact
from installed import bundle_for
from tiers import slow_but
from torch_model import random_tensors, torch_logits

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model

CLOSE = 1e-3


class Made(NamedTuple):
    """A bundle, its model in torch, and texts with ends of documents."""

    path: Path
    config: ModelConfig
    texts: list[list[int]]

    def check(self, text: Sequence[int], answer: Sequence[int], swapped: tuple[int, int]) -> None:
        """Check that each token of an answer is the best one; two tokens may look up each other's rows."""
        tensors, rows = random_tensors(self.config, 0)
        one, other = swapped
        for table in rows.values():
            table[[one, other]] = table[[other, one]]
        logits = torch_logits(self.config, tensors, rows, [*text, *answer]).numpy()
        for place, token in enumerate(answer, len(text) - 1):
            assert logits[place].max() - logits[place, token] < CLOSE, place


NAMES = ["means of rows", "plus, means, mixture"]


@pytest.fixture(scope="module", params=slow_but(NAMES[:1], NAMES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("means")
    window = {"row_window": 4, "max_context": 512}
    config = ModelConfig(**(SIZES | VARIANTS[request.param] | window))
    checkpoint, ids, _ = write(folder / "checkpoint", config, tokens=40)
    path = export_exact(checkpoint, folder / "bundle")
    ends = stem_edge.open_bundle(path).manifest.model.eos_ids
    config = msgspec.structs.replace(config, eos_ids=ends)
    long = np.random.default_rng(1).integers(0, 250, 250).tolist()
    return Made(path, config, [ids, [7], [*ids, ends[0]], [*long, *ids[:30]]])


WAYS: list[Callable[[Model, list[list[int]]], Answers]] = [
    in_turn,
    with_guesses,
    together,
    after_kept,
]


@pytest.mark.parametrize("way", WAYS)
def test_answers(made: Made, engine: EngineName, way: Any) -> None:
    with stem_edge.load(bundle_for(made.path, engine), engine=engine, slots=40) as model:
        for number, answer in way(model, made.texts).items():
            made.check(made.texts[number], answer, (0, 0))


@pytest.mark.parametrize("way", [in_turn, together])
def test_answers_with_an_edit(made: Made, engine: EngineName, way: Any) -> None:
    """Rows of other tokens enter the means at every place of the source."""
    text = list(b"a cab, a bad cab")
    with stem_edge.load(bundle_for(made.path, engine), engine=engine) as model:
        edits = [swap(model, *pair, scope="everywhere") for pair in ("ab", "ba")]
        with model.edited(*edits):
            made.check(text, way(model, [text])[0], (ord("a"), ord("b")))


def test_a_prompt_kept_in_a_file(made: Made, engine: EngineName, tmp_path: Path) -> None:
    for cached in (False, True):
        options: Any = {"engine": engine, "prompt_cache": tmp_path / "prompts"}
        with stem_edge.load(bundle_for(made.path, engine), **options) as model:
            text = made.texts[-1]
            made.check(text, tokens(model.generate(text, max_new_tokens=NEW)), (0, 0))
            assert (model.stats.cached_tokens > 0) == cached


def test_few_slots(made: Made) -> None:
    with pytest.raises(InputError, match="slots is 6; expected 7 to 260"):
        stem_edge.load(made.path, slots=6)
    with stem_edge.load(made.path, slots=7) as model:
        for number, answer in together(model, made.texts).items():
            made.check(made.texts[number], answer, (0, 0))


def test_devices_refuse_them(made: Made) -> None:
    with pytest.raises(
        BackendError, match="means of the rows of several tokens run on the CPU only"
    ):
        stem_edge.load(made.path, device_memory="4GB")
