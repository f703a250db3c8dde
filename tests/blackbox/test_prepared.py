"""Prepared backbones of every kind of model: the bits that they compute as they are exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from ways import answered

import stem_edge
from stem_edge.commands.main import main

MAPS = Path("/proc/self/maps")


@pytest.mark.parametrize("name", ["gate", "mixture", "hash-moe", "ngrams", "engram"])
def test_the_same_bits(
    name: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out, found = models.checkpoint_of(name, shared), tmp_path / "out", list[Any]()
    stem_edge.export_bundle(checkpoint, out, type="int8", rows="int8", max_kl=9.0)
    capsys.readouterr()
    assert main(["prepare", str(out), "--cache-dir", str(tmp_path / "made"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["files"] and {*record["files"]} <= {*map(str, relative(Path(record["folder"])))}
    for cache in ("none", "made"):
        with stem_edge.load(out, cache_dir=tmp_path / cache, threads=1) as model:
            if MAPS.exists():  # on Linux
                assert (str(tmp_path / "made") in MAPS.read_text()) == (cache == "made")
            texts = models.prompts(name)
            found.append(([model.logits(ids) for ids in texts], answered(model, texts[1])))
    for plain, prepared in zip(found[0][0], found[1][0], strict=True):
        assert np.array_equal(plain, prepared)
    assert found[0][1] == found[1][1]


def relative(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*")]
