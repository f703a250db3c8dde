"""Types of keys and values: how near logits stay, for any chunks, in windows and borrowed layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from architectures import SIZES, VARIANTS
from exact_models import GEMMA, Exact, exact_gemma, exact_stem
from installed import bundle_for
from make_checkpoint import Shape, write_checkpoint
from prompt_graph import load_with
from tiers import slow_but

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.quantization.calibration import read_token_ids, sequences
from stem_edge.export.quantization.kv_peaks import TEXT_TOKENS, KvPeaks
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.graph.formats import BACKBONE_DATA, EngineName
from stem_edge.graph.kv import KV_TYPES, QUANTIZED, KvChoice, KvType, OnnxCaches
from stem_edge.graph.names import head_width
from stem_edge.graph.weight_plan import SMALL_ALIGNMENT
from stem_edge.numerics.arithmetic import rms_norm
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import embed

TOKENS = 420
WIDE: dict[str, Any] = {"head_dim": 32, "n_heads": 2, "n_kv_heads": 1}  # as ggml's types need
CHANGES: dict[str, dict[str, Any]] = {
    "pairs, padded heads": {},
    "halves, padded heads": {"rope_interleaved": False},
    "wide heads": WIDE,
    "normed halves in a window": {
        **WIDE,
        "sliding_window": 20,
        "window_layers": (0, 2),
        "rope_interleaved": False,
        "qk_norm_eps": 1e-5,
    },
    "all at once": VARIANTS["all at once"],
}
FAST = {GEMMA, "normed halves in a window"}
# Largest RMS of the difference of logits, relative to their own RMS. All of them are below 1, which
# logits of zeros would have. With random weights, errors grow from layer to layer, most in Gemma.
MOST: dict[KvType, float] = {"fp32": 1e-4, "fp16": 5e-3, "int8": 0.15, "int4": 0.8}
MOST_OF_GEMMA: dict[KvType, float] = {"fp32": 1e-4, "fp16": 5e-3, "int8": 0.25, "int4": 0.8}
SIZES_OF_STEPS = (128, 64, 16, 4)


class Case(NamedTuple):
    exact: Exact
    most: dict[KvType, float]


@pytest.fixture(scope="module", params=slow_but(FAST, (GEMMA, *CHANGES)))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("kv")
    # Peaks are those of a text like the one that is judged: of random tokens.
    ids = 90 if request.param == GEMMA else SIZES["vocab_size"]
    np.save(folder / "text.npy", np.random.default_rng(9).integers(ids - 1, size=2000))
    options: dict[str, Any] = {"calibration": folder / "text.npy"}
    if request.param == GEMMA:
        return Case(exact_gemma(folder, TOKENS, **options), MOST_OF_GEMMA)
    changes = {"max_context": 1024} | CHANGES[request.param]
    return Case(exact_stem(folder, changes, TOKENS, **options), MOST)


@pytest.fixture(params=KV_TYPES)
def kv(request: pytest.FixtureRequest) -> KvType:
    found: KvType = request.param
    return found


def test_logits_are_near_the_models(case: Case, engine: EngineName, kv: KvType) -> None:
    manifest = stem_edge.open_bundle(bundle_for(case.exact.path, engine)).manifest
    if engine == "ggml" and kv in QUANTIZED and manifest.model.head_dim % 32:
        with pytest.raises(InputError, match="ggml needs heads of a multiple of 32 values"):
            stem_edge.load(bundle_for(case.exact.path, engine), engine=engine, kv=kv)
        return
    footprint = footprint_of(manifest, engine).with_kv(kv)
    with stem_edge.load(
        bundle_for(case.exact.path, engine), engine=engine, kv=kv, context_length=TOKENS
    ) as model:
        found = model.logits(case.exact.ids)
        assert model.plan.kv == kv
        assert model.plan.kv_cache == footprint.kv_nbytes(TOKENS)
        context = model.engine.open_context(TOKENS)
        model.engine.step(context, np.array(case.exact.ids[:64]))
        assert context.backend.nbytes == footprint.kv_nbytes(64)
    difference = np.sqrt(
        np.square(found - case.exact.expected).mean() / np.square(case.exact.expected).mean()
    )
    assert difference < case.most[kv]
    assert kv != "int4" or difference > MOST["fp16"]  # otherwise nothing was quantized


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_chunks_change_no_logits(case: Case, kv: KvType) -> None:
    """Up to where windows drop tokens. onnxruntime adds up in float16 where the cache has that."""
    count = 128
    with load_with(case.exact.path, engine="onnxruntime", kv=kv, prefill=False) as model:
        found = []
        for size in SIZES_OF_STEPS:
            context = model.engine.open_context(TOKENS)
            pieces = np.split(np.array(case.exact.ids[:count]), range(size, count, size))
            steps = [model.engine.step(context, piece, len(piece)).copy() for piece in pieces]
            found.append(np.concatenate(steps))
    for logits in found[1:]:
        assert np.array_equal(logits, found[0])


def test_auto_takes_int8_only_where_nothing_else_fits(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", Shape(max_seqlen=1 << 16))
    path = stem_edge.export_bundle(checkpoint, tmp_path / "bundle", type="fp32").path
    options: dict[str, Any] = {"context_length": 1 << 16, "slots": 4}
    usual, small = (stem_edge.memory_plan(path, kv=kv, **options) for kv in ("auto", "int8"))
    assert (usual.kv, small.kv) == ("fp32", "int8")
    assert usual.kv_cache == 4 * small.kv_cache > 40 << 20
    between = (usual.total + small.total) // 2
    assert stem_edge.memory_plan(path, between, **options).kv == "int8"
    with stem_edge.load(path, between, **options) as model:
        assert model.plan.kv == "int8"
        assert np.isfinite(model.logits([1, 2, 3])).all()
    refused: list[tuple[int, KvChoice]] = [(between, "fp32"), (usual.process, "auto")]
    for memory, kv in refused:
        with pytest.raises(MemoryPlanError, match="fp32 KV cache of 65536 tokens"):
            stem_edge.memory_plan(path, memory, kv=kv, **options)


def test_refusals(tiny_bundle: Path) -> None:
    manifest = stem_edge.open_bundle(tiny_bundle).manifest
    assert manifest.backbone is not None
    older = msgspec.structs.replace(manifest.backbone, kv_peaks=False)
    footprint = replace(footprint_of(manifest), backbone=older, caches=OnnxCaches(older.kv_peaks))
    assert footprint.with_kv("fp16").kv == "fp16"
    for kv in QUANTIZED:
        with pytest.raises(InputError, match=f"kv is '{kv}': .* export it again"):
            footprint.with_kv(kv)
    with pytest.raises(InputError, match="kv is 'int2'; expected one of auto, fp32"):
        stem_edge.load(tiny_bundle, kv="int2")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kv is 'int8'; keys and values on an accelerator are"):
        stem_edge.load(tiny_bundle, kv="int8", device_memory="1GB")


def test_peaks_are_those_of_all_tokens_that_the_exporter_saw(tiny_checkpoint: Path) -> None:
    """Of keys, the length of a pair before its rotation, which does not depend on the position."""
    source = read_checkpoint(tiny_checkpoint)
    config, peaks = source.config, KvPeaks(source)
    texts = [list(range(40)), list(range(100, 130))]
    expected: dict[str, list[F32]] = {"keys": [], "values": []}
    for text in texts:
        assert peaks.run(text, config.own_kv_layers).shape == (len(text), config.dim)
        x = rms_norm(
            embed(config, source.backbone, text),
            source.backbone["layers.0.attention_norm"],
            config.norm_eps,
        )
        k, v = (x @ whole(source.backbone[f"layers.0.{name}"]).T for name in ("wk", "wv"))
        pairs = np.repeat(np.hypot(k[:, 0::2], k[:, 1::2]), 2, axis=1)
        expected["keys"].append(pairs)
        expected["values"].append(np.abs(v))
    found, width = peaks.padded(), head_width(config.layer(0))
    for what, parts in expected.items():
        greatest = np.concatenate(parts).max(axis=0).reshape(config.n_kv_heads, config.head_dim)
        padded = np.full((config.n_kv_heads, width), greatest.max())
        padded[:, : config.head_dim] = greatest
        assert np.allclose(found[f"layers.0.{what}.peaks"], padded.ravel(), rtol=1e-5)


def test_peaks_are_in_the_bundle(tiny_checkpoint: Path, tiny_bundle: Path) -> None:
    source, bundle = read_checkpoint(tiny_checkpoint), stem_edge.open_bundle(tiny_bundle)
    config, data = source.config, bundle.file(BACKBONE_DATA).read_bytes()
    peaks = KvPeaks(source)
    judged = list(bundle.manifest.report.probe_tokens)
    text = read_token_ids(None, convert_tokenizer("bytes", None, add_bos=True), config.vocab_size)
    for ids in (judged, *sequences(text, TEXT_TOKENS, config.max_context)):
        peaks.run(ids, config.own_kv_layers)
    offset = 0
    for name, values in peaks.padded().items():
        assert data[offset : offset + values.nbytes] == values.tobytes(), name
        offset += -(-values.nbytes // SMALL_ALIGNMENT) * SMALL_ALIGNMENT
