"""Timing after many tokens, whose keys and values are copies."""

from __future__ import annotations

from typing import Any

import bench_depth
import numpy as np
import pytest
from architectures import SIZES, write
from installed import bundle_for, export_ggml

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.graph.formats import EngineName

DEPTH, GIVEN = 700, 64


@pytest.mark.parametrize("window", [0, 20], ids=["all tokens", "windows"])
def test_the_context_is_as_full_as_if_it_had_computed_them(
    window: int, engine: EngineName, tmp_path: Any
) -> None:
    changes = {"max_context": 1024, "sliding_window": window, "window_layers": (0, 2)}
    config = ModelConfig(**(SIZES | (changes if window else {"max_context": 1024})))
    write(tmp_path / "checkpoint", config)
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "out", backbone="fp32")
    export_ggml(tmp_path / "checkpoint", tmp_path / "out")
    with stem_edge.load(
        bundle_for(tmp_path / "out", engine), engine=engine, context_length=1024
    ) as model:
        context, computed = (model.engine.open_context(1024) for _ in range(2))
        ids = np.arange(GIVEN)
        model.engine.step(context, ids)
        bench_depth.fill(context.backend, GIVEN, DEPTH)
        context.position = DEPTH
        for start in range(0, DEPTH, GIVEN):
            model.engine.step(computed, ids[: DEPTH - start])
        assert context.backend.nbytes == computed.backend.nbytes
        assert context.position == computed.position
        for count in (1, 2, 100, 1):
            found = model.engine.step(context, ids[:1].repeat(count))
            assert np.isfinite(found).all()
        assert context.position == DEPTH + 104


def test_the_command(tmp_path: Any, engine: EngineName, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "checkpoint", ModelConfig(**(SIZES | {"max_context": 1024})))
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "out", backbone="fp32")
    export_ggml(tmp_path / "checkpoint", tmp_path / "out")
    depths = ["--depths", "100", "300", "--prompt-tokens", "64", "--new-tokens", "3"]
    bench_depth.main([str(bundle_for(tmp_path / "out", engine)), "--engine", engine, *depths])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["100", "300"]
