"""The graph for prompts is opened by the first prompt that needs it, and models do without it."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from loading import load_fixed
from prompt_graph import without_prompt_graph

import stem_edge

IDS = [*range(40, 60)]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("later") / "bundle"
    return stem_edge.export_bundle(tiny_checkpoint, out, prefill_graph=True).path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_is_opened_by_the_first_prompt_that_needs_it(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    with load_fixed(copy, threads=1) as model:
        model.generate_text(IDS[:3], max_new_tokens=4)
        (copy / "prefill.data").rename(tmp_path / "prefill.data")
        model.generate_text(IDS[:5], max_new_tokens=4)
        (tmp_path / "prefill.data").rename(copy / "prefill.data")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = model.logits(IDS)
    with load_fixed(without_prompt_graph(bundle, tmp_path / "plain"), threads=1) as model:
        assert not np.array_equal(found, model.logits(IDS))


def test_prompts_go_on_without_it(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    with load_fixed(without_prompt_graph(bundle, tmp_path / "plain"), threads=1) as model:
        expected = model.logits(IDS)
    with load_fixed(copy, threads=1) as model:
        (copy / "prefill.data").unlink()
        with pytest.warns(Warning, match="answers take longer") as told:
            found = [model.logits(IDS), model.logits(IDS)]
    assert len(told) == 1
    assert np.array_equal(found[0], found[1])
    assert np.allclose(found[0], expected, atol=1e-5)
