"""Engram modules before some layers: answers in every way of computing them, and what is refused.

Logits, batches, prefixes and steps of several tokens are tried beside other kinds of models (test_logits.py,
test_batches.py, test_prefixes.py, test_apart_steps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from answer_ways import at_once
from architectures import SIZES, write
from exact_models import TOLERANCE, export_exact, off
from ngram_answers import END, MadeNgrams, NgramAnswers
from torch_engram import ENGRAM, with_engram
from torch_model import random_tables, random_tensors, torch_logits

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError, InputError
from stem_edge.export.checkpoints.readers import open_checkpoint
from stem_edge.graph.kv import KvType
from stem_edge.ngrams.schemes import QwenConfig
from stem_edge.numerics.ngram_hash import hash_of
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import forward
from stem_edge.special import dense_twin

LAYERS, KERNEL = len(ENGRAM["stem_layers"]), ENGRAM["engram_kernel"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeNgrams:
    folder = tmp_path_factory.mktemp("engram")
    config = ModelConfig(**(SIZES | ENGRAM | {"max_context": 512}))
    assert config.ngram_end == END

    def logits(ids: Sequence[int]) -> F32:
        tensors, _ = random_tensors(config, 0)
        tables = random_tables(config, 0)[config.row_layers[0]]
        before, twin = with_engram(config, tensors, tables, ids), dense_twin(config)
        found: F32 = torch_logits(twin, tensors, {}, list(ids), before=before).numpy()
        return found

    write(folder / "checkpoint", config)
    path = export_exact(folder / "checkpoint", folder / "bundle", ggml=False)
    return MadeNgrams(path, folder / "checkpoint", config, logits)


def test_the_reference(made: MadeNgrams) -> None:
    source = open_checkpoint(made.checkpoint)
    for ids in made.texts:
        found = forward(source.config, source.backbone, source.rows, ids)
        assert off(found, made.logits(ids)) < TOLERANCE


def test_few_slots(made: MadeNgrams) -> None:
    """A step of 4 tokens looks up 8 rows for each."""
    with pytest.raises(InputError, match="slots is 31; expected 32 to 928"):
        stem_edge.load(made.path, slots=31)
    with stem_edge.load(made.path, slots=32) as model:
        assert model.engine.chunk_tokens == 4
        for ids in made.texts:
            assert off(at_once(model, ids), made.logits(ids)) < TOLERANCE


class TestAnswers(NgramAnswers):
    """Answers in every way of computing them, and what is refused."""


@pytest.mark.parametrize(("kv", "nbytes"), [("fp32", 4), ("fp16", 2)])
def test_the_plan_counts_what_is_convolved(made: MadeNgrams, kv: KvType, nbytes: int) -> None:
    footprint = footprint_of(stem_edge.open_bundle(made.path).manifest).with_kv(kv)
    config, ids = made.config, made.texts[0]
    alone = 2 * config.n_layers * config.n_kv_heads * 16 + LAYERS * config.dim
    assert footprint.kv_nbytes(40) == 40 * nbytes * alone
    read = 40 * nbytes * (alone - LAYERS * config.dim) + KERNEL * nbytes * LAYERS * config.dim
    assert footprint.kv_read_nbytes(40) == read
    with stem_edge.load(made.path, kv=kv) as model:
        assert model.plan.kv_cache == footprint.kv_nbytes(model.plan.context_length)
        assert off(model.logits(ids), made.logits(ids)) < (TOLERANCE if kv == "fp32" else 0.02)


def test_published_keys_are_those_of_the_model() -> None:
    """Those of Qwen3.8-Flash-Next, whose only layer with rows is the second."""
    scheme = QwenConfig(248_320, [2], 2560, 3, 8, 20_000_000, 248_044)
    (table,) = scheme.tables()
    multipliers = table.hash.multipliers[-1]
    assert multipliers == (23703573157769, 20109073645365, 8052911324071)
    changes = {
        "vocab_size": 248_320,
        "stem_layers": (table.layer,),
        "ngram_sizes": table.hash.sizes,
        "ngram_multipliers": (multipliers,),
        "ngram_filler": 248_044,
        "ngram_end": 248_044,
    }
    keys = hash_of(ModelConfig(**(SIZES | ENGRAM | changes)))
    assert keys == table.hash
    rows = keys.keys([11, 523, 9001, 44])[[0, 0, 3], [0, 1, 0]] - [0, table.hash.sizes[0], 0]
    assert rows.tolist() == [13555483, 4877156, 2823642]


def test_a_tensor_of_another_shape_is_named(made: MadeNgrams, tmp_path: Path) -> None:
    text = (made.checkpoint / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"engram_kernel": 4', '"engram_kernel": 3'))
    (tmp_path / "model.safetensors").symlink_to(made.checkpoint / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"engram.conv.weight is \[48, 1, 4\]; expected \[48, 1, 3\]"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ngram_sizes": (5, 7)}, "as many sizes for each of 2 to ngram_order ids, in each layer"),
        ({"stem_layers": ()}, r"stem_layers \(\), row_rank 16"),
        ({"row_rank": 0}, "row_rank 0"),
        ({"borrowed_kv_layers": 1}, "last layers borrow keys and values"),
        ({"ngram_multipliers": ((1, 2, 3),)}, r"has \[3\] numbers; expected 3 for each of 2"),
        ({"ngram_multipliers": ((1, 2), (3, 4))}, r"has \[2, 2\] numbers; expected 3"),
        ({"ngram_multipliers": ((1, 2, 0), (1, 2, 3))}, "expected 1 to 35474507834056830"),
        ({"ngram_multipliers": ((1, 2, 1 << 55), (1, 2, 3))}, "products have 64 bits"),
        ({"ngram_filler": 260}, "ngram_filler is 260; expected 0 to 259"),
        ({"ngram_filler": -1}, "ngram_filler is -1; expected 0 to 259"),
        ({"engram_kernel": 17}, "engram_kernel is 17; expected 0 to 16"),
        ({"engram_kernel": -1}, "engram_kernel is -1; expected 0 to 16"),
        ({"stem_ffn": "ngrams", "stem_layers": (0,)}, "with stem_ffn ngrams; expected engram"),
    ],
)
def test_impossible_numbers(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig(**(SIZES | ENGRAM | changes))
