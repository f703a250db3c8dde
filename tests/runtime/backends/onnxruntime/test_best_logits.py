"""Heads of 4 bits that are an embedding of 8 bits, too: the greatest logits get the lower bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import SIZES, write
from formats import export_as, usual_format

import stem_edge
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError
from stem_edge.export.job import measured_types, plan, recipe
from stem_edge.graph.formats import BEST, WeightType

CONFIG = ModelConfig(**(SIZES | {"vocab_size": BEST + 500, "dim": 64, "tied_head": True}))


def test_only_the_greatest_are_as_exact_as_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids, _ = write(tmp_path / "checkpoint", CONFIG, tokens=8)
    prompts, found = [ids[:n] for n in (2, 5, 8)], dict[str, Any]()
    kinds: dict[str, dict[Any, WeightType]] = {
        "exact": {},
        "int4": {"embedding": "int4", "head": "int4"},
        "split": {"embedding": "int8", "head": "int4"},
    }
    for name, own in kinds.items():
        format = usual_format("fp32", block_size=32, kinds=own)
        made = export_as(path, tmp_path / name, format, rows="fp32", max_kl=9.0)
        with stem_edge.load(made.path, threads=1) as model:
            found[name] = model.logits(ids)
            alone = [model.generate_text(each, max_new_tokens=6) for each in prompts]
            assert model.generate_texts(prompts, max_new_tokens=6) == alone
        with stem_edge.load(made.path, threads=1, device_memory="1GB") as model:
            best = np.argsort(found[name], axis=1)[:, -99:]
            one, other = (np.take_along_axis(x, best, 1) for x in (found[name], model.logits(ids)))
            assert np.allclose(one, other, atol=0.3)  # of logits up to 40
    order = np.argsort(-found["exact"], axis=1)
    wrong = {name: np.abs(found[name] - found["exact"]) for name in ("int4", "split")}
    near = {name: np.take_along_axis(x, order[:, : BEST // 2], 1) for name, x in wrong.items()}
    far = np.take_along_axis(wrong["split"], order[:, BEST + 200 :], axis=1)
    assert 4 * near["split"].mean() < near["int4"].mean()
    assert 2 * near["split"].mean() < far.mean()
    # An export chooses such a head if it is large.
    monkeypatch.setitem(plan.NATS, recipe.BALANCED, 0.0)
    for least, head in ((CONFIG.vocab_size * CONFIG.dim, "int4"), (1 << 30, "int8")):
        monkeypatch.setattr(measured_types, "LARGE_HEAD", least)
        chosen = stem_edge.export_bundle(path, tmp_path / head, max_kl=9.0, force=True)
        assert chosen.manifest.backbone is not None
        types = [chosen.manifest.backbone.type_of(kind) for kind in ("embedding", "head")]
        assert types == ["int8", head]


def test_a_manifest_with_another_format_is_refused(tmp_path: Path) -> None:
    path, *_ = write(tmp_path / "checkpoint", CONFIG, tokens=8)
    file = export_as(path, tmp_path / "out", usual_format("fp32"), rows="fp32").path / MANIFEST
    manifest = json.loads(file.read_text())
    for kinds, offsets in (("fp32", False), ("int8", True)):
        types = {"embedding": kinds, "head": "int4"}
        manifest["backbone"] |= {"tied": True, "kinds": types, "offsets": offsets}
        file.write_text(json.dumps(manifest))
        with pytest.raises(BundleError, match="this model cannot be stored in this format"):
            stem_edge.load(file.parent)
