"""Steps of any size give the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from installed import DEMO
from prompt_graph import without_prompt_graph

import stem_edge


@pytest.mark.parametrize("prefill_graph", [True, False])
def test_quantized_logits_do_not_depend_on_the_size_of_steps(
    prefill_graph: bool, tmp_path: Path
) -> None:
    """A step looks up as many rows as there are slots at most."""
    path = DEMO if prefill_graph else without_prompt_graph(DEMO, tmp_path / "copy")
    texts = [np.random.default_rng(n).integers(0, 1756, n).tolist() for n in (33, 37, 40)]
    with stem_edge.load(path, threads=1) as model:
        expected = [model.logits(ids) for ids in texts]
    for slots in (4, 7, 16, 32):
        with stem_edge.load(path, threads=1, slots=slots) as model:
            for ids, whole in zip(texts, expected, strict=True):
                assert np.abs(model.logits(ids) - whole).max() < 1e-3
