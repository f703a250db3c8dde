"""Models whose tokens look up rows of n-grams: what all forms of them must do alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answer_ways import NEW, Answers, after_kept, in_turn, together, tokens, with_guesses
from formats import export_as, usual_format
from installed import needs_ggml

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, ExportError, InputError
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.backends.onnxruntime.prepared.preparing import make

CLOSE, END = 1e-3, 7


@dataclass(frozen=True)
class MadeNgrams:
    """A model in torch, its bundle, and texts with ends of documents."""

    path: Path
    checkpoint: Path
    config: ModelConfig
    logits: Callable[[Sequence[int]], F32]  # of all tokens [T, V], by the model in torch

    @property
    def texts(self) -> list[list[int]]:
        long = np.random.default_rng(1).integers(0, 250, 250).tolist()
        ids = long[:40]
        for at in (13, 26, 27):
            ids[at] = END
        return [ids, [7], [*ids, END], [*long, *ids[:30]]]

    def check(self, text: Sequence[int], answer: Sequence[int]) -> None:
        """Check that each token of an answer is the best one."""
        logits = self.logits([*text, *answer])
        for place, token in enumerate(answer, len(text) - 1):
            assert logits[place].max() - logits[place, token] < CLOSE, place


class NgramAnswers:
    """Tests of a fixture `made`, for a class of each form."""

    @pytest.mark.parametrize("way", [in_turn, with_guesses, together, after_kept])
    def test_answers(
        self, made: MadeNgrams, way: Callable[[Model, list[list[int]]], Answers]
    ) -> None:
        with stem_edge.load(made.path, slots=60) as model:
            for number, answer in way(model, made.texts).items():
                made.check(made.texts[number], answer)

    def test_a_prompt_kept_in_a_file(self, made: MadeNgrams, tmp_path: Path) -> None:
        for cached in (False, True):
            with stem_edge.load(made.path, prompt_cache=tmp_path / "prompts") as model:
                text = made.texts[-1]
                made.check(text, tokens(model.generate(text, max_new_tokens=NEW)))
                assert (model.stats.cached_tokens > 0) == cached

    def test_quantized(self, made: MadeNgrams, tmp_path: Path) -> None:
        """Prompts have a graph of their own, and the backbone is packed for this processor."""
        options: Any = {"rows": "int8", "prefill_graph": True}
        export_as(made.checkpoint, tmp_path / "bundle", usual_format("int8"), **options)
        make(stem_edge.open_bundle(tmp_path / "bundle"), tmp_path / "cache", 1)
        ids = made.texts[0]
        with stem_edge.load(tmp_path / "bundle", cache_dir=tmp_path / "cache") as model:
            assert divergence(made.logits(ids), model.logits(ids)).mean() < 0.02
            assert model.stats.row_hits + model.stats.row_misses == len(ids) * made.config.lookups
            assert in_turn(model, made.texts) == with_guesses(model, made.texts)

    def test_what_cannot_run_them_says_so(self, made: MadeNgrams, tmp_path: Path) -> None:
        with pytest.raises(BackendError, match="rows of n-grams run on the CPU only"):
            stem_edge.load(made.path, device_memory="4GB")
        with pytest.raises(ExportError, match="choose rows fp32, fp16, int8 or int4"):
            stem_edge.export_bundle(made.checkpoint, tmp_path / "mixed", rows="mixed")
        with (
            stem_edge.load(made.path) as model,
            pytest.raises(InputError, match="rows of this model belong to n-grams"),
        ):
            model.logits([1, 2], stem_ids=[1, 3])

    @needs_ggml
    def test_ggml_cannot_run_them(self, made: MadeNgrams, tmp_path: Path) -> None:
        with pytest.raises(ExportError, match="has rows of n-grams, which run on onnxruntime only"):
            stem_edge.export_bundle(made.checkpoint, tmp_path / "ggml", engine="ggml")
