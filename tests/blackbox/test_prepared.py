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
from ways import answered

import stem_edge
from stem_edge.commands.main import main
from stem_edge.runtime.backends.onnxruntime.providers.session import products_saturate

MAPS = Path("/proc/self/maps")
KINDS = ("gate", "mixture", "hash-moe", "ngrams", "engram")


@pytest.mark.parametrize("name", slow_but(["mixture", "engram"], KINDS))
def test_the_same_bits(
    name: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out, found = models.checkpoint_of(name, shared), tmp_path / "out", list[Any]()
    stem_edge.export_bundle(checkpoint, out, type="int8", rows="int8", max_kl=9.0)
    capsys.readouterr()
    assert main(["prepare", str(out), "--cache-dir", str(tmp_path / "made"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    folder = Path(record["folder"])
    assert record["files"] and all((folder / name).exists() for name in record["files"])
    for cache in ("none", "made"):
        with stem_edge.load(out, cache_dir=tmp_path / cache, threads=1) as model:
            if MAPS.exists():  # on Linux
                assert (str(tmp_path / "made") in MAPS.read_text()) == (cache == "made")
            texts = models.prompts(name)
            found.append(([model.logits(ids) for ids in texts], answered(model, texts[1])))
    for plain, prepared in zip(found[0][0], found[1][0], strict=True):
        assert np.array_equal(plain, prepared)
    assert found[0][1] == found[1][1]


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
        # Without VNNI, blocks of 32 round by the number of tokens in a step, so nothing is drafted.
        assert drafted or (block == 32 and products_saturate() and not model.stats.drafted_tokens)
