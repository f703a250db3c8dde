"""The ggml backend through the engine: lifetime of memory, and reuse of graphs."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import stepwise
from installed import DATA, needs_ggml
from loading import load_fixed

import stem_edge
from stem_edge.runtime import Model
from stem_edge.runtime.backends.ggml.backend import GgmlContext
from stem_edge.runtime.backends.ggml.graph import GgmlGraph, Scratch
from stem_edge.runtime.backends.ggml.kv_cache import Ring

pytestmark = needs_ggml
IDS = np.random.default_rng(0).integers(0, 256, 100).tolist()


def test_an_interrupted_step_leaves_no_graph_over_memory_that_is_gone(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger graph needs new scratch memory; the step can be repeated after any interrupt."""
    original = Scratch.place
    interrupted: list[bool] = []

    def place(self: Scratch, graph: GgmlGraph) -> bool:
        grew = original(self, graph)
        if len(graphs) > 2 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        graphs.append(graph)
        return grew

    graphs: list[GgmlGraph] = []
    with load_fixed(tiny_gguf) as model:
        expected, context = stepwise(model, IDS[:3]), model.engine.open_context(100)
        monkeypatch.setattr(Scratch, "place", place)
        assert np.array_equal(model.engine.step(context, np.array(IDS[:1]))[0], expected[0])
        graphs += graphs
        with pytest.raises(KeyboardInterrupt):
            model.engine.step(context, np.array(IDS[1:90]))
        for position in (1, 2):
            found = model.engine.step(context, np.array(IDS[position : position + 1]))
            assert np.array_equal(found[0], expected[position])


@pytest.mark.parametrize(
    ("window", "capacity", "first"),
    [
        (0, 128, 60),
        (1, 128, 60),
        (5, 128, 60),
        (200, 128, 60),
        (5, 20, 20),
        (5, 21, 60),
        (2, 16, 0),
    ],
)
def test_masks(window: int, capacity: int, first: int) -> None:
    """Compare with the token that each cell holds once all tokens of the step have theirs."""
    positions = np.arange(first, first + 15)
    held = np.full(128, -1)
    for position in range(first + 15):
        held[position % capacity] = position
    ago = positions[:, None] - held
    seen = (held >= 0) & (ago >= 0) & ((ago < window) | (window == 0))
    ring = Ring(window, capacity)
    assert ring.attended(first + 15) == (64 if capacity < 128 else 128)
    assert np.array_equal(ring.mask(positions, 128), np.where(seen, 0, -np.inf))


@pytest.mark.parametrize("name", ["plain", "gemma4"])
def test_the_plan_holds_in_a_long_context(name: str, tmp_path: Path) -> None:
    """Masks grow with the context. Memory is measured by the kernel's counters only."""
    from hf_folders import make_gemma
    from make_checkpoint import Shape, write_checkpoint

    checkpoint = tmp_path / "checkpoint"
    if name == "plain":
        write_checkpoint(checkpoint, Shape(max_seqlen=32_768))
    else:
        sizes = {"vocab_size": 307, "vocab_size_per_layer_input": 307}
        make_gemma(**sizes, max_position_embeddings=32_768).save_pretrained(checkpoint)
        shutil.copy(DATA / "conformance" / "gemma4-text" / "tokenizer.json", checkpoint)
    stem_edge.export_bundle(checkpoint, tmp_path / "out", engine="ggml", type="q8_0")
    with load_fixed(tmp_path / "out", context_length=32_768) as model:
        context = model.engine.open_context(32_768)
        assert isinstance(context.backend, GgmlContext)
        context.backend.begin(np.arange(100), 32_768 - 128)
        context.backend.finish(np.zeros(100, np.int32), 1)
        held = (
            context.backend.steps.scratch.nbytes + 100 * 32_768 * 2
        )  # because then we pass a mask
        assert held < model.plan.activations


def native_parts(model: Model) -> list[weakref.ref[object]]:
    context = model.engine.open_context(10)
    assert isinstance(context.backend, GgmlContext)
    loaded = context.backend.steps.model
    return [weakref.ref(part) for part in (loaded, loaded.processor, loaded.weights)]


def test_closing_frees_everything(tiny_gguf: Path) -> None:
    model = load_fixed(tiny_gguf)
    parts = native_parts(model)
    assert all(part() is not None for part in parts)
    model.close()
    gc.collect()
    assert all(part() is None for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["q4_0", "q4_k_m", "q8_0", "f16"])
@pytest.mark.parametrize("repack", [False, True])
def test_quantized_backbones_repacked_or_not(
    weights: Any, repack: bool, wide_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exported = stem_edge.export_bundle(wide_checkpoint, out, engine="ggml", type=weights)
    assert exported.manifest.reports["ggml"].divergence < 0.05
    with load_fixed(out) as model:
        expected = model.logits(IDS)
    with load_fixed(out, repack=repack) as model:
        found, steps = model.logits(IDS), stepwise(model, IDS)
    greatest = np.abs(expected).max()
    # Kernels for one token, for many, and for rearranged matrices round activations differently.
    assert np.abs(found - expected).max() < 0.05 * greatest
    assert np.abs(steps - expected).max() < 0.05 * greatest


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with rows of 256 values, because K-quants need them."""
    from make_checkpoint import Shape, write_checkpoint

    shape = Shape(dim=256, n_layers=2, d_ff=512, stem_layers=(1,))
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "checkpoint", shape)
