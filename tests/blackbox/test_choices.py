"""What load and export choose or refuse for a model; what a device gives; which flash reads a text takes."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import oracle
import pytest
from installed import DEMO, needs_ggml
from loading import load_fixed
from make_checkpoint import Shape, write_checkpoint
from models import DEVICE, GGML, KINDS, ORT
from oracle import Oracle
from ways import WAYS, Case

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, ExportError, InputError, MemoryPlanError
from stem_edge.graph.kv import KvChoice
from stem_edge.numerics.distributions import divergence
from stem_edge.runtime.rows.cache import AGEING_USES_PER_SLOT


@cache
def missing(provider: str) -> str:
    """Return why a device cannot be used here; empty where it can."""
    try:
        stem_edge.load(DEMO, provider=provider, device_memory="100MB", threads=1).close()
    except BackendError as error:
        return f"{provider} is not here: {error}"
    return ""


@pytest.mark.parametrize("provider", ["webgpu", "cuda", "coreml"])
@pytest.mark.parametrize("way", ["logits", "alone", "beside others", "few slots"])
@pytest.mark.parametrize("name", ["stem", "windows", "gemma4", "gemma3n"])
def test_accelerators(
    name: str,
    way: str,
    provider: str,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ways of test_tokens.py on a device that is no part of the CPU's memory."""
    if why := missing(provider):
        pytest.skip(why)
    case = Case(
        name, DEVICE, shared, tmp_path, Oracle(oracle.reference_of(name, shared), KINDS[name])
    )
    real, given = stem_edge.load, {"provider": provider, "device_memory": "100MB"}
    load: Any = lambda path, **more: real(path, **(more | given))
    monkeypatch.setattr(stem_edge, "load", load)
    WAYS[way](case)


def test_auto_takes_int8_only_where_nothing_else_fits(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", Shape(max_seqlen=1 << 16))
    path = stem_edge.export_bundle(checkpoint, tmp_path / "bundle", type="fp32").path
    options: dict[str, Any] = {"context_length": 1 << 16, "slots": 4}
    usual, small = (stem_edge.memory_plan(path, kv=kv, **options) for kv in ("auto", "int8"))
    assert (usual.kv, small.kv) == ("fp32", "int8")
    assert usual.kv_cache == 4 * small.kv_cache > 40 << 20
    between = (usual.total + small.total) // 2
    assert stem_edge.memory_plan(path, between, **options).kv == "int8"
    with stem_edge.load(path, between, **options) as model:
        assert model.plan.kv == "int8"
        assert np.isfinite(model.logits([1, 2, 3])).all()
    refused: list[tuple[int, KvChoice]] = [(between, "fp32"), (usual.process, "auto")]
    for memory, kv in refused:
        with pytest.raises(MemoryPlanError, match="fp32 KV cache of 65536 tokens"):
            stem_edge.memory_plan(path, memory, kv=kv, **options)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("stem", {"kv": "int2"}, "kv is 'int2'; expected one of auto, fp32"),
    ("stem", {"prompt_cache": "p", "device_memory": "1GB"}, "prompt_cache"),
    ("stem", {"kv": "int8", "device_memory": "1GB"}, "keys and values on an accelerator are"),
    ("phone", {"kv": "int8"}, "kv is 'int8': .* export it again"),
    ("stem", {"kv": "fp16"}, "kv is 'fp16': onnxruntime takes up to 40 times as long"),
    ("stem", {"resident": True, "slots": 9}, "resident keeps the rows of every token"),
    ("stem", {"overlap": False}, "there is no option overlap; expected some"),
    ("stem", {"n_ctx": 64}, "no option n_ctx; use context_length; expected some of memory"),
    ("stem", {"max_tokens": 9}, "max_tokens; Model.generate takes max_new_tokens"),
    ("ngrams", {"slots": 23}, "slots is 23; expected 24 to 736"),
    ("engram", {"slots": 31}, "slots is 31; expected 32 to 928"),
    ("mixture", {"slots": 5}, "slots is 5; expected 6 to 260"),
    ("ngrams", {"device_memory": "4GB"}, "rows of n-grams run on the CPU only"),
    ("engram", {"device_memory": "4GB"}, "rows of n-grams run on the CPU only"),
    ("mixture", {"device_memory": "4GB"}, "rows of several tokens run on the CPU only"),
]


@pytest.mark.parametrize(("name", "options", "said"), REFUSED)
def test_what_load_refuses(name: str, options: Any, said: str, shared: Path) -> None:
    with pytest.raises((InputError, BackendError), match=said):
        stem_edge.load(models.bundle_of(name, ORT, shared), threads=1, **options)


@needs_ggml
def test_heads_that_ggml_cannot_keep_in_8_bits(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="ggml needs heads of a multiple of 32 values"):
        stem_edge.load(models.bundle_of("stem", GGML, shared), kv="int8")
    monkeypatch.setattr("stem_edge.runtime.backends.options.usable_cpus", lambda: 513)
    with pytest.raises(InputError, match="threads is 513; ggml takes at most 512"):
        stem_edge.load(models.bundle_of("stem", GGML, shared))


def test_which_ids_experts_can_have(shared: Path) -> None:
    means: Any = [(7, 8), 6]
    with stem_edge.load(models.bundle_of("hash-moe", ORT, shared), threads=1) as model:
        assert np.array_equal(model.logits([5, 6], stem_ids=[(5, 5), 6]), model.logits([5, 6]))
        with pytest.raises(InputError, match="a mean of experts is not an expert"):
            model.logits([5, 6], stem_ids=means)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ngrams", {"rows": "mixed"}, "choose rows fp32, fp16, int8 or int4"),
        ("engram", {"rows": "mixed"}, "choose rows fp32, fp16, int8 or int4"),
        ("hash-moe", {"rows": "fp16"}, "experts cannot be fp16, because"),
        pytest.param(
            *("ngrams", {"engine": "ggml"}, "has rows of n-grams, which run on onnxruntime only"),
            marks=needs_ggml,
        ),
        pytest.param(*("gemma3n", {"engine": "ggml"}, "run on onnxruntime only"), marks=needs_ggml),
    ],
)
def test_what_export_refuses(
    name: str, options: Any, said: str, shared: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=said):
        stem_edge.export_bundle(models.checkpoint_of(name, shared), tmp_path / "out", **options)


@pytest.mark.parametrize("name", ["ngrams", "engram"])
def test_quantized_ngrams_read_each_row_that_a_token_looks_up(
    name: str, shared: Path, tmp_path: Path
) -> None:
    ids = models.prompts(name)[2]
    checkpoint, out = models.checkpoint_of(name, shared), tmp_path / "out"
    stem_edge.export_bundle(checkpoint, out, type="int8", rows="int8", prefill_graph=True)
    expected = oracle.reference_of(name, shared).logits(ids)
    with stem_edge.load(out, threads=1) as model:
        assert divergence(expected, model.logits(ids)).mean() < 0.02
        assert model.stats.row_hits + model.stats.row_misses == len(ids) * model.config.lookups


@pytest.mark.parametrize(("name", "distinct"), [("gemma4", 250), ("hash-moe", 5)])
def test_each_row_is_read_once_and_found_again(name: str, distinct: int, shared: Path) -> None:
    """Tokens that share an expert share its read; while it is cached, each lookup is a hit."""
    path, read = models.bundle_of(name, ORT, shared), []
    ids, slots = models.prompts(name)[2] * 3, 64 if name == "gemma4" else None
    with stem_edge.load(path, slots=slots, threads=1) as model:
        for _ in range(2):
            model.logits(ids)
            read.append(model.stats.row_misses)
            assert model.stats.row_hits == len(ids) - read[-1]
        model.logits(ids, stem_ids=ids)  # which are their own rows
        read.append(model.stats.row_misses)
    assert 0 < read[0] <= min(distinct, len(set(ids))) and read[1:] == [0, 0]


@pytest.mark.parametrize("slots", [260, 12])
def test_rows_that_are_read_ahead_change_no_figure(slots: int, shared: Path) -> None:
    found = []
    for overlap in (False, True):
        with load_fixed(
            models.bundle_of("stem", ORT, shared), threads=1, slots=slots, overlap=overlap
        ) as model:
            for ids in models.prompts("stem"):
                answer = model.generate_text(ids, max_new_tokens=24)
                stats = model.stats
                found.append((overlap, answer, stats.row_hits, stats.row_misses, stats.flash_bytes))
    plain, ahead = found[:4], found[4:]
    assert [one[1:4] for one in plain] == [one[1:4] for one in ahead]
    assert slots == 12 or [one[4] for one in plain] == [one[4] for one in ahead]


def test_rows_that_were_read_for_a_prompt_that_is_left_evict_none(shared: Path) -> None:
    """Of the rows of its next step, the next prompt needs one, and nearly all that are in slots."""
    ids, read = [*range(20, 52)], []
    with stem_edge.load(models.bundle_of("stem", ORT, shared), threads=1, slots=16) as model:
        size = model.plan.logit_tokens // 2 * 2  # tokens of a step
        next(model.logits_chunks(ids))
        for prompt in ([*ids[: size - 1], ids[size]], ids[:size]):
            model.logits(prompt)
            read.append(model.stats.row_misses)
    assert 8 < size < 16 and read == [1, 0]


def test_the_least_used_rows_leave_the_cache(shared: Path) -> None:
    """Of rows that are used alike, the one whose last use is longest ago; uses are halved at times."""
    slots, rng, uses, last = 8, np.random.default_rng(0), Counter[int](), dict[int, int]()
    with stem_edge.load(models.bundle_of("stem", ORT, shared), threads=1, slots=slots) as model:
        left = AGEING_USES_PER_SLOT * slots
        for now in range(900):
            token, times = 10 + min(int(rng.zipf(1.3)), 14) + now // 200, 1 + now % 3 % 2
            model.logits([token] * times)
            assert model.stats.row_misses == (token not in last)
            uses[token] += times
            if (left := left - times) <= 0:
                uses = Counter({one: count // 2 for one, count in uses.items()})
                left = AGEING_USES_PER_SLOT * slots
            if token not in last and len(last) == slots:
                del last[min(last, key=lambda one: (uses[one], last[one]))]
            last[token] = now


NGRAMS, ENGRAM = models.SIZES | models.NGRAMS, models.SIZES | models.ENGRAM


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (NGRAMS | {"ngram_order": 1}, "ngram_order is 1 with 6 ngram_sizes; expected 2 to 16"),
        (NGRAMS | {"ngram_sizes": (5, 7)}, "as many sizes for each of 2 to ngram_order ids"),
        (NGRAMS | {"ngram_sizes": (5, 7, 0)}, "3 ngram_sizes of 12 rows; expected at most 256"),
        (NGRAMS | {"ngram_end": 260}, "ngram_end is 260; expected 0 to 259"),
        (NGRAMS | {"stem_layers": (1,)}, r"stem_layers \(1,\), row_rank 16 and 1 streams"),
        (NGRAMS | {"row_rank": 0}, "row_rank 0"),
        (NGRAMS | {"stem_ffn": "stem"}, "n-grams with stem_ffn stem; expected ngrams or engram"),
        (ENGRAM | {"ngram_sizes": (5, 7)}, "2 to ngram_order ids, in each layer"),
        (ENGRAM | {"stem_layers": ()}, r"stem_layers \(\), row_rank 16"),
        (ENGRAM | {"borrowed_kv_layers": 1}, "last layers borrow keys and values"),
        (
            ENGRAM | {"ngram_multipliers": ((1, 2, 3),)},
            r"has \[3\] numbers; expected 3 for each of 2",
        ),
        (ENGRAM | {"ngram_multipliers": ((1, 2), (3, 4))}, r"has \[2, 2\] numbers; expected 3"),
        (ENGRAM | {"ngram_multipliers": ((1, 2, 0), (1, 2, 3))}, "expected 1 to 35474507834056830"),
        (ENGRAM | {"ngram_multipliers": ((1, 2, 1 << 55), (1, 2, 3))}, "products have 64 bits"),
        (ENGRAM | {"ngram_filler": 260}, "ngram_filler is 260; expected 0 to 259"),
        (ENGRAM | {"engram_kernel": 17}, "engram_kernel is 17; expected 0 to 16"),
        (
            ENGRAM | {"stem_ffn": "ngrams", "stem_layers": (0,)},
            "with stem_ffn ngrams; expected engram",
        ),
    ],
)
def test_impossible_numbers_of_ngrams(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig(**config)
