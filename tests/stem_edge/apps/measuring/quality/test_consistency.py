"""`verify --runs`: every way of running a bundle gives the same tokens, and a way that does not is
named."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest
from formats import export_as, format_with
from installed import DEMO
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.apps.measuring.quality.consistency import verify_runs
from stem_edge.commands.bundles import verify
from stem_edge.commands.main import main
from stem_edge.errors import BundleError

WAYS = ["kept prompts", "sequences together", "drafts", "prompts kept in files"]


@pytest.mark.slow
def test_all_ways() -> None:
    seen: list[str] = []
    results = verify_runs(DEMO, max_new_tokens=24, progress=seen.append)
    assert list(results) == seen == WAYS
    assert results.pop("drafts") == "not run: steps of several tokens round differently"
    assert set(results.values()) == {"ok"}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86")
@pytest.mark.parametrize(
    ("block", "size"), [(32, 128), pytest.param(64, 1152, marks=pytest.mark.slow)]
)
def test_drafts_where_steps_of_several_tokens_round_alike(
    block: int, size: int, tmp_path: Path
) -> None:
    """As they do in 4 bits on x86, which preparing finds.

    Also where kernels round an unpaired row of 4-bit products differently, as in blocks of 64, if layers are large.
    """
    checkpoint = write_checkpoint(
        tmp_path / "checkpoint", Shape(dim=size, d_ff=2 * size, n_layers=1, stem_layers=())
    )
    bundle = export_as(
        checkpoint, tmp_path / "bundle", format_with("int4", block_size=block), max_kl=9
    )
    cache = tmp_path / "cache"
    assert main(["prepare", str(bundle.path), "--cache-dir", str(cache), "--threads", "1"]) == 0
    assert verify_runs(bundle.path, 6, cache) == dict.fromkeys(WAYS, "ok")


def test_a_dense_model(dense_bundle: Path) -> None:
    manifest = stem_edge.open_bundle(dense_bundle).manifest
    with pytest.raises(BundleError, match="a dense model, which has no tables"):
        stem_edge.open_tables(dense_bundle)
    assert manifest.report.worst_logit_difference < 1e-4
    with stem_edge.load(dense_bundle) as model:
        assert model.plan.slots == 0
        list(model.generate([1, 2, 3], max_new_tokens=3))
        assert (model.stats.row_hits, model.stats.flash_bytes) == (0, 0)
    assert main(["inspect", str(dense_bundle)]) == 0
    assert main(["inspect", str(dense_bundle), "--json"]) == 0


def test_a_way_that_gives_other_tokens_is_named(
    dense_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another model takes the bundle's place before the last way."""
    write_checkpoint(tmp_path / "checkpoint", Shape(stem_layers=(), n_layers=2))
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "other", type="fp32")

    def status(text: str) -> None:
        if text.endswith("running: prompts kept in files"):
            shutil.rmtree(tmp_path / "bundle")
            shutil.copytree(tmp_path / "other", tmp_path / "bundle")

    monkeypatch.setattr(verify, "show_status", status)
    for more in ([], ["--json"]):
        shutil.rmtree(tmp_path / "bundle", ignore_errors=True)
        shutil.copytree(dense_bundle, tmp_path / "bundle")
        assert main(["verify", str(tmp_path / "bundle"), "--runs", *more]) == 1
        out, err = capsys.readouterr()
        if more:
            assert json.loads(out)["ok"] is False
        else:
            line = next(one for one in out.splitlines() if one.startswith("prompts kept in files"))
            assert "other tokens of prompt 1 from new token " in line
            assert "1 of 3 ways of running it give other tokens" in err
