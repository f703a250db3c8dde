"""Prepared backbones of every kind of model: the bits that they compute as they are exported."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from formats import export_as, format_with
from guessing import Told
from make_checkpoint import Shape, write_checkpoint
from tiers import slow_but
from ways import MOST_NATS, NEW, answered, many

import stem_edge
from stem_edge.commands.main import main
from stem_edge.graph.formats import WeightType
from stem_edge.graph.kv import KvType
from stem_edge.numerics.distributions import divergence
from stem_edge.runtime import Model
from stem_edge.runtime.backends.onnxruntime.providers.session import products_saturate

Capture = pytest.CaptureFixture[str]
MAPS = Path("/proc/self/maps")
# Models, types of matrices, types of keys and values.
CASES: list[tuple[str, WeightType, KvType]] = [
    ("stem", "int4", "fp32"), ("stem", "int8", "int8"), ("dense", "int4", "int4"), ("gate", "int4", "fp32"),
    ("windows", "int8", "fp32"), ("windows", "int4", "int8"), ("mixture", "int4", "fp32"),
    ("hash-moe", "int8", "fp32"), ("ngrams", "int8", "fp32"), ("engram", "int8", "int8"),
    ("gemma4", "int4", "int8"), ("gemma4", "int8", "fp32"), ("gemma3n", "int8", "int8"),
]  # fmt: skip
FAST = [CASES[number] for number in (0, 5, 6, 9, 10, 12)]


@pytest.mark.parametrize(("name", "weights", "kv"), slow_but(FAST, CASES))
def test_the_same_bits(
    name: str, weights: WeightType, kv: KvType, shared: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Of logits and answers, with a graph for prompts, and far beyond what windows keep."""
    ids = tmp_path / "ids.npy"  # like the prompts, for the scales of int8 keys
    np.save(ids, np.random.default_rng(9).integers(10, 250, 500))
    options: Any = {"rows": "int8", "prefill_graph": True, "max_kl": 99.0, "calibration": ids}
    format = format_with(weights, bits={"laurel_out": 32} if name == "gemma3n" else {})
    checkpoint, texts, found = models.checkpoint_of(name, shared), models.prompts(name), list[Any]()
    out = export_as(checkpoint, tmp_path / "out", format, **options).path
    capsys.readouterr()
    command = ["prepare", str(out), "--cache-dir", str(tmp_path / "made"), "--kv", kv, "-t", "1"]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    folder = Path(record["folder"])
    assert record["files"] and all((folder / name).exists() for name in record["files"])
    loads: list[tuple[str, KvType]] = [("none", "fp32"), ("none", kv), ("made", kv)]
    for cache, type in loads:
        with stem_edge.load(out, cache_dir=tmp_path / cache, kv=type, threads=1) as model:
            if MAPS.exists():  # on Linux
                assert (str(tmp_path / "made") in MAPS.read_text()) == (cache == "made")
            found.append(([model.logits(ids) for ids in texts], answered(model, texts[1])))
    for exact, plain, prepared in zip(*(logits for logits, _ in found), strict=True):
        assert np.array_equal(plain, prepared)
        assert kv == "fp32" or divergence(exact, plain).mean() < 2 * MOST_NATS[kv]
    assert found[1][1] == found[2][1]
    with stem_edge.load(
        out, cache_dir=tmp_path / "made", kv=kv, threads=1, exact=True, speculate=(told := Told())
    ) as model:
        check_steps_of_several_tokens(model, told, texts, record["steps"] or {})
    if name != "hash-moe":  # which has fewer experts than the steps that are compared have tokens
        assert record["steps"]["same_bits"] and record["steps"]["same_in_batches"]


def check_steps_of_several_tokens(model: Model, told: Told, texts: Any, steps: Any) -> None:
    """Answers are the same beside others and with drafts, some of which are wrong."""
    alone, accepted = {number: answered(model, ids) for number, ids in enumerate(texts)}, 0
    assert many(model, texts, max_new_tokens=NEW, logprobs=1, sequences=3) == alone
    assert (model.stats.tokens_per_step > 1) == steps.get("same_in_batches", False)
    for number, ids in enumerate(texts):
        model.forget_prefixes()
        told.tell([*ids, *alone[number].ids], 5)
        assert answered(model, ids) == alone[number]
        accepted += model.stats.accepted_tokens
    assert (accepted > 0) == steps.get("same_bits", False)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86")
@pytest.mark.parametrize(("block", "size"), slow_but([(32, 128)], [(32, 128), (64, 1152)]))
def test_drafts_where_steps_of_several_tokens_round_alike(
    block: int, size: int, tmp_path: Path
) -> None:
    """As they do in 4 bits; also where kernels round an unpaired row differently, as in blocks of 64."""
    shape = Shape(dim=size, d_ff=2 * size, n_layers=1, stem_layers=())
    checkpoint, told = write_checkpoint(tmp_path / "checkpoint", shape), Told()
    stored = format_with("int4", block_size=block)
    path, cache = export_as(checkpoint, tmp_path / "bundle", stored, max_kl=9).path, tmp_path / "c"
    assert main(["prepare", str(path), "--cache-dir", str(cache), "--threads", "1"]) == 0
    with stem_edge.load(path, cache_dir=cache, speculate=told, exact=True, threads=1) as model:
        plain = answered(model, (prompt := [*range(5, 100)]), max_new_tokens=24)
        told.tell([*prompt, *plain.ids], 5)
        assert answered(model, prompt, max_new_tokens=24).ids == plain.ids
        drafted = model.stats.drafted_tokens > model.stats.accepted_tokens > 0
        # Without VNNI, blocks of 32 round by the number of tokens in a step. Others may take too long for two tokens.
        nothing = block == 64 or products_saturate()
        assert drafted or (nothing and not model.stats.drafted_tokens)
