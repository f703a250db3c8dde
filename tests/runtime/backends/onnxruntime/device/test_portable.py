"""The backend of portable graphs: logits of reference models, and recovery from failed steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from architectures import KINDS, QUANTIZED, SIZES, VARIANTS, quantized, write
from device_runs import exact_graphs
from installed import DEMO

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.graph import linear
from stem_edge.graph.device.variants import graphs
from stem_edge.graph.names import HEAD
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendContext
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.device import portable as backend_portable
from stem_edge.runtime.backends.onnxruntime.device.loader import variant_graphs
from stem_edge.runtime.backends.onnxruntime.device.needs import portable_needs
from stem_edge.runtime.backends.onnxruntime.device.portable import PortableBackend
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.resolve import resolve
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store

TOLERANCE = 1e-4


class Runner:
    """A bundle on portable graphs, with a slot for each of some tokens."""

    def __init__(
        self, bundle: Bundle, tokens: Sequence[int], providers: Sequence[Provider]
    ) -> None:
        manifest = bundle.manifest
        self._slot = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
        self.slots: ArraySlots | None = None
        if manifest.tables is not None and manifest.table_format is not None:
            self.slots = ArraySlots(manifest.tables, len(self._slot))
            with open_store(bundle.file(TABLES), manifest.table_format) as store:
                records = store.read(np.array([*self._slot]))
            self.slots.write(np.arange(len(self._slot)), records)
        made = variant_graphs(bundle, "portable")
        self.backend = PortableBackend(manifest.model, made, self.slots, 1, providers)

    def step(self, context: BackendContext, ids: Sequence[int], position: int, logits: int) -> F32:
        context.begin(np.array(ids, np.int64), position)
        return context.finish(self.slot_ids(ids), logits)

    def slot_ids(self, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Slots of the tokens' rows."""
        return np.array([self._slot[token] for token in ids], np.int32)

    def logits(self, ids: Sequence[int], chunks: Sequence[int]) -> F32:
        """Logits [T, V], in chunks of these sizes, the last one again and again."""
        context, found, at = self.backend.open_context(len(ids)), [], 0
        sizes = [*chunks, *[chunks[-1]] * len(ids)]
        while at < len(ids):
            chunk = ids[at : at + sizes.pop(0)]
            found.append(self.step(context, chunk, at, len(chunk)))
            at += len(chunk)
        return np.concatenate(found)


CHUNKS = ([64], [1], [7, 13, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_logits_of_every_architecture(name: str, tmp_path: Path) -> None:
    config = ModelConfig(**(SIZES | VARIANTS[name]))
    path, ids, expected = write(tmp_path / "checkpoint", config)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", backbone="fp32", tables="fp32")
    runner = Runner(bundle, ids, [CPU])
    for chunks in CHUNKS:
        assert np.abs(runner.logits(ids, chunks) - expected).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_logits_of_quantized_backbones(name: str, tmp_path: Path) -> None:
    """Compared with the plain graphs, without their rounding of activations."""
    bundle, ids = quantized(tmp_path, name)
    runner = Runner(bundle, ids, [CPU])
    backend = OrtBackend(bundle.manifest.model, exact_graphs(bundle), runner.slots, 1)
    context = backend.open_context(len(ids))
    context.begin(np.array(ids), 0)
    expected = context.finish(runner.slot_ids(ids), len(ids))
    for chunks in CHUNKS:
        assert np.abs(runner.logits(ids, chunks) - expected).max() < TOLERANCE


def test_a_head_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, ids = quantized(tmp_path / "whole", "int8")
    expected = Runner(whole, ids, [CPU]).logits(ids, [64])
    monkeypatch.setattr(linear, "SPLIT_VALUES", 48 * 32)  # rows of 48, 32 at a time
    bundle, _ = quantized(tmp_path, "int8")
    manifest = bundle.manifest
    made = graphs("portable", manifest.model, manifest.tables, format_of(bundle))[HEAD]
    assert [len(node.inputs) for node in made.nodes if node.op == "Concat"] == [9]
    assert np.abs(Runner(bundle, ids, [CPU]).logits(ids, [64]) - expected).max() < TOLERANCE


# ---------------------------------------------------------------- the KV cache, and failures

LONG = np.random.default_rng(3).integers(0, 1500, 200).tolist()


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner(open_bundle(DEMO), LONG, [CPU])


def test_the_cache_fills_under_way(demo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = demo.logits(LONG, [200])
    monkeypatch.setattr(backend_portable, "KV_STEP", 16)
    context = demo.backend.open_context(200)
    place = 6 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, bytes
    found, at = [], 0
    for size in (10, 30, *[1] * 80, 80):
        assert context.nbytes == at * place
        found.append(demo.step(context, LONG[at : at + size], at, size))
        at += size
    assert np.abs(np.concatenate(found) - expected).max() < TOLERANCE


def test_contexts_take_turns(demo: Runner) -> None:
    expected = [demo.logits(ids, [20]) for ids in (LONG[:20], LONG[100:120])]
    contexts = [demo.backend.open_context(20), demo.backend.open_context(64)]
    for at in range(20):
        ids = (LONG[at], LONG[100 + at])
        # Not copied, because a step of the other context must not overwrite them.
        found = [demo.step(c, [token], at, 1) for c, token in zip(contexts, ids, strict=True)]
        for logits, wanted in zip(found, expected, strict=True):
            assert np.abs(logits - wanted[at]).max() < TOLERANCE


def test_any_number_of_logits(demo: Runner) -> None:
    expected = demo.logits(LONG[:30], [30])
    for count in (0, 1, 7, 30):
        found = demo.step(demo.backend.open_context(30), LONG[:30], 0, count)
        assert found.shape == (count, 1756)
        assert not count or np.abs(found - expected[-count:]).max() < TOLERANCE


@pytest.mark.parametrize("graph", ["embed", "early", "late", "head"])
@pytest.mark.parametrize(
    ("said", "error"), [("kernel\nfell over", BackendError), ("std::bad_alloc", OutOfMemoryError)]
)
def test_a_step_that_failed_can_be_tried_again(
    demo: Runner,
    graph: str,
    said: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> None:
        raise RuntimeError(said)

    expected = demo.logits(LONG[:20], [20])
    context, real = demo.backend.open_context(20), demo.backend.sessions[graph]
    demo.step(context, LONG[:10], 0, 0)
    failing = SimpleNamespace(get_inputs=real.get_inputs, get_outputs=real.get_outputs, run=run)
    with monkeypatch.context() as patch:
        patch.setitem(demo.backend.sessions, graph, failing)
        message = rf"for the backbone \({graph}\) at position 10.*{said.split()[-1]}"
        with pytest.raises(error, match=message) as caught:
            demo.step(context, LONG[10:20], 10, 10)
    assert "\n" not in str(caught.value)
    assert np.abs(demo.step(context, LONG[10:20], 10, 10) - expected[10:]).max() < TOLERANCE


def test_logits_that_are_nan() -> None:
    runner = Runner(open_bundle(DEMO), LONG[:3], [CPU])
    slots = runner.slots
    assert slots is not None
    expected = runner.logits(LONG[:3], [3])
    context, scale = runner.backend.open_context(3), slots.scales[0][0][1].copy()
    runner.step(context, LONG[:1], 0, 1)
    slots.scales[0][0][1] = np.nan
    with pytest.raises(BackendError, match="position 1 are not finite"):
        runner.step(context, LONG[1:3], 1, 2)
    slots.scales[0][0][1] = scale
    # The failed step must leave nothing in the KV cache, even if a shorter one follows.
    found = [runner.step(context, [LONG[at]], at, 1) for at in (1, 2)]
    assert np.abs(np.concatenate(found) - expected[1:]).max() < TOLERANCE


def test_a_closed_backend_holds_no_sessions() -> None:
    runner = Runner(open_bundle(DEMO), LONG[:3], [CPU])
    runner.backend.close()
    assert not runner.backend.sessions


def test_what_it_takes_beside_the_plan_grows_with_chunks_and_contexts() -> None:
    footprint = footprint_of(open_bundle(DEMO).manifest, "onnxruntime")

    def beside(chunk: int, context: int) -> int:
        usual = cpu_needs(footprint, context, 1, prepared=False, prefill=False).host
        found = portable_needs(footprint, context, "webgpu").host
        return found.fixed - usual.fixed + chunk * (found.chunk_token - usual.chunk_token)

    least, chunk, context = beside(16, 64), beside(32, 64), beside(16, 128)
    matrix = 2 * 4 * 1756 * 128  # the head, in floats and turned
    rows = 16 * 384 * 3 * 4
    assert least > matrix + rows
    assert chunk - least > rows
    # Scores of four heads, and keys and values of one layer joined and turned.
    assert context - least > 64 * (16 * 4 * 2 * 4 + 2 * 2 * 2 * 32 * 4)


# ---------------------------------------------------------------- another provider

ACCURATE = {"load_config": '{"CPU": {"EXECUTION_MODE_HINT": "ACCURACY"}}'}


@pytest.fixture(scope="module")
def openvino() -> Sequence[Provider]:
    module = pytest.importorskip("onnxruntime_ep_openvino")
    return resolve([("openvino", ACCURATE)], {"openvino": module.get_library_path()})


def test_openvino_runs_every_operator(demo: Runner, openvino: Sequence[Provider]) -> None:
    """The session excludes the CPU, so that no operator falls back to it."""
    runner = Runner(open_bundle(DEMO), LONG, openvino)
    expected = demo.logits(LONG[:48], [48])
    for chunks in ([48], [1], [16, 31, 1]):
        assert np.abs(runner.logits(LONG[:48], chunks) - expected).max() < 1e-3


def test_openvino_writes_the_same_text(openvino: Sequence[Provider]) -> None:
    bundle = open_bundle(DEMO)
    every = range(bundle.manifest.model.vocab_size)
    texts = []
    for providers in ([CPU], openvino):
        runner = Runner(bundle, every, providers)
        texts.append(_greedy(runner, LONG[:8], 64))
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 8


def _greedy(runner: Runner, prompt: Sequence[int], count: int) -> list[int]:
    context, ids = runner.backend.open_context(len(prompt) + count), [*prompt]
    logits = runner.step(context, ids, 0, 1)
    for _ in range(count):
        ids.append(int(logits[-1].argmax()))
        logits = runner.step(context, ids[-1:], len(ids) - 1, 1)
    return ids[len(prompt) :]
