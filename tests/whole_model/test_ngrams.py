"""Models whose tokens look up rows of n-grams: logits and answers, in every way of computing them.

What they should be is computed here from LongCat's formulas (arXiv 2601.21204), with whole numbers of Python;
the layers after the input embedding are those of torch_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from answer_ways import at_once, together
from architectures import SIZES
from conformance import stepwise
from exact_models import TOLERANCE, export_exact, off
from ngram_answers import END, MadeNgrams, NgramAnswers
from stem_format import save_stem
from torch_model import random_tables, random_tensors, torch_logits

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.numerics.quantize import F32
from stem_edge.special import dense_twin

NGRAMS: dict[str, Any] = {
    "stem_ffn": "ngrams",
    "stem_layers": (0,),
    "row_rank": 16,
    "ngram_order": 4,
    "ngram_sizes": (101, 103, 105, 107, 109, 211),
    "ngram_end": END,
    "max_context": 512,
}


def row_of(ids: Sequence[int], order: int, size: int) -> int:
    """Row of a table that the last of some ids looks up: ids before an end, or the text, are 0."""
    total = ids[-1]
    for distance in range(1, order):
        seen = ids[-1 - distance :]
        known = len(seen) > distance and END not in seen[:-1]
        total += (seen[0] if known else 0) * pow(SIZES["vocab_size"], distance)
    return total % size


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeNgrams:
    folder = tmp_path_factory.mktemp("ngrams")
    config = ModelConfig(**(SIZES | NGRAMS))
    tensors, _ = random_tensors(config, 0)
    tables = list(random_tables(config, 0)[0].split(list(config.ngram_sizes)))
    count = len(tables)
    stored = {tensor_name(name): tensor for name, tensor in tensors.items()}
    projects = stored.pop("model.layers.0.mlp.stem_project.weight").chunk(count, dim=1)
    for number, both in enumerate(zip(tables, projects, strict=True)):
        for part, tensor in zip(("embedders", "post_projs"), both, strict=True):
            stored[f"model.ngram_embeddings.{part}.{number}.weight"] = tensor

    def logits(ids: Sequence[int]) -> F32:
        x = tensors["embedding"][list(ids)]
        for number, (table, project) in enumerate(zip(tables, projects, strict=True)):
            order = 2 + number // (count // (config.ngram_order - 1))
            rows = [row_of(ids[: at + 1], order, len(table)) for at in range(len(ids))]
            x = x + table[rows] @ project.T
        mixed = tensors | {"embedding": x / (1 + count)}
        found: F32 = torch_logits(dense_twin(config), mixed, {}, [*range(len(ids))]).numpy()
        return found

    save_stem(folder / "checkpoint", config, stored, convert_tokenizer("bytes", None, add_bos=True))
    path = export_exact(folder / "checkpoint", folder / "bundle", ggml=False)
    return MadeNgrams(path, folder / "checkpoint", config, logits)


@pytest.mark.parametrize(
    ("way", "slots"), [(at_once, None), (at_once, 24), (stepwise, None), (stepwise, 24)]
)
def test_logits(made: MadeNgrams, way: Any, slots: int | None) -> None:
    """With 24 slots, steps have 4 tokens at most."""
    with stem_edge.load(made.path, slots=slots) as model:
        assert slots is None or model.engine.chunk_tokens == 4
        for ids in made.texts:
            assert off(way(model, ids), made.logits(ids)) < TOLERANCE


class TestAnswers(NgramAnswers):
    """Answers in every way of computing them, and what is refused."""


def test_few_slots(made: MadeNgrams) -> None:
    """A step of 4 tokens looks up 6 rows for each."""
    with pytest.raises(InputError, match="slots is 23; expected 24 to 736"):
        stem_edge.load(made.path, slots=23)
    with stem_edge.load(made.path, slots=24) as model:
        for number, answer in together(model, made.texts).items():
            made.check(made.texts[number], answer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ngram_order": 1}, "ngram_order is 1 with 6 ngram_sizes; expected 2 to 16"),
        ({"ngram_sizes": (5, 7)}, "as many sizes for each of 2 to ngram_order ids"),
        ({"ngram_sizes": (5, 7, 0)}, "3 ngram_sizes of 12 rows; expected at most 256"),
        ({"ngram_end": 260}, "ngram_end is 260; expected 0 to 259"),
        ({"stem_layers": (1,)}, r"stem_layers \(1,\), row_rank 16 and 1 streams"),
        ({"row_rank": 0}, "row_rank 0"),
        ({"stem_ffn": "stem"}, "n-grams with stem_ffn stem; expected ngrams or engram"),
    ],
)
def test_impossible_numbers(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig(**(SIZES | NGRAMS | changes))
