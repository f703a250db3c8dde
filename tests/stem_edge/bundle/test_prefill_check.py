"""Check that the prefill graph is as exact here as its bundle says, and what follows if not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from architectures import SIZES, VARIANTS, write
from contract import refused
from tiers import slow_but

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import MANIFEST, encode_manifest
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.prefill_check import (
    PROBE_TOKENS,
    mean_divergence,
    prefill_refusal,
    probe_tokens,
)
from stem_edge.commands.main import main
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.graph.decode import PREFILL_DATA
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.backends.onnxruntime import loader, prefill_exactness
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.prefill_exactness import (
    cached_divergence,
    measured_divergence,
)

PROMPT = "a prompt of more than eight tokens"


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "quantized"
    stem_edge.export_bundle(tiny_checkpoint, out, backbone="int4", prefill_graph=True)
    return out


def promising(source: Path, out: Path, diverges: float | None) -> Bundle:
    """A copy of a bundle whose report says something else of its prefill graph."""
    shutil.copytree(source, out)
    manifest = open_bundle(out).manifest
    report = msgspec.structs.replace(manifest.report, prefill_from_decode=diverges)
    manifest = msgspec.structs.replace(manifest, reports={"onnxruntime": report})
    (out / MANIFEST).write_bytes(encode_manifest(manifest))
    return open_bundle(out)


@pytest.mark.parametrize(
    ("promised", "found", "used"),
    [
        (0.1, 0.125, True),
        (0.1, 0.127, False),
        (0.0, 0.0009, True),
        (0.0, 0.0011, False),
        (0.1, None, True),
        (None, 9.0, True),
    ],
)
def test_how_far_is_too_far(
    promised: float | None, found: float | None, used: bool, quantized: Path, tmp_path: Path
) -> None:
    bundle = promising(quantized, tmp_path / "b", promised)
    assert (prefill_refusal(bundle.manifest, found) == "") == used


def test_the_probe_is_that_of_the_report(quantized: Path, tmp_path: Path) -> None:
    decode, prefill = np.random.default_rng(0).standard_normal((2, 60, 5)).astype(np.float32)
    assert mean_divergence(decode, prefill) == mean_divergence(decode[:48], prefill[:48]) > 0.1
    manifest = open_bundle(quantized).manifest
    assert probe_tokens(manifest) == list(manifest.report.probe_tokens[:PROBE_TOKENS])
    assert not probe_tokens(promising(quantized, tmp_path / "b", None).manifest)
    for ids in ((1,) * 7, (1,) * 8 + (2**20,)):
        report = msgspec.structs.replace(manifest.report, probe_tokens=ids)
        assert not probe_tokens(msgspec.structs.replace(manifest, reports={"onnxruntime": report}))


@pytest.mark.parametrize("kind", slow_but(["mixed"], ["indexed", "mixed", "few records"]))
def test_it_is_measured_with_the_rows_of_the_tokens(
    kind: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """Tokens may share records; the result equals that of the export."""
    source, options = tiny_checkpoint, dict[str, Any]()
    if kind == "mixed":
        (tmp_path / "text.txt").write_text(PROMPT * 9)
        options = {"tables": "mixed", "calibration": tmp_path / "text.txt"}
    else:
        experts = 60 if kind == "indexed" else 5
        config = ModelConfig(**(SIZES | VARIANTS["hash-moe"] | {"n_experts": experts}))
        write(source := tmp_path / "checkpoint", config)
    bundle = stem_edge.export_bundle(
        source, tmp_path / "out", backbone="int4", prefill_graph=True, **options
    )
    found = measured_divergence(bundle, tmp_path, 1 << 40)
    assert found == pytest.approx(bundle.manifest.report.prefill_from_decode, rel=0.01)


def test_rows_that_cannot_be_read_measure_nothing(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RowReadError("flash failed")

    monkeypatch.setattr("stem_edge.runtime.rows.store.RowStore.read", fails)
    assert measured_divergence(open_bundle(quantized), tmp_path, 1 << 40) is None
    assert cached_divergence(open_bundle(quantized), tmp_path) is None


def test_without_memory_for_it_nothing_is_measured(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_exactness, "COPIES", 1 << 20)
    with stem_edge.load(quantized, memory="1GB", cache_dir=tmp_path) as model:
        assert "is measured when the backbone is prepared" in model.plan.prefill_refused


def test_only_the_weights_of_the_manifest_are_measured(quantized: Path, tmp_path: Path) -> None:
    """Otherwise the result would be taken for that of another bundle, whose hashes a forged one has."""
    bundle = Path(shutil.copytree(quantized, tmp_path / "b"))
    data = bytearray((bundle / PREFILL_DATA).read_bytes())
    data[0] ^= 1
    (bundle / PREFILL_DATA).write_bytes(data)
    refused(lambda: stem_edge.load(bundle, cache_dir=tmp_path / "c"), BundleError, "sha256 is")
    assert not list((tmp_path / "c").glob("exactness/*"))


def test_a_prefill_graph_that_computes_no_numbers_is_not_used(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OrtContext.finish

    def finish(self: OrtContext, *given: Any) -> F32:
        if self._graphs._after_rows == ["prefill"]:
            raise NotFiniteError("not a number")
        return real(self, *given)

    monkeypatch.setattr(OrtContext, "finish", finish)
    bundle = open_bundle(quantized)
    found = measured_divergence(bundle, tmp_path, 1 << 40)
    assert cached_divergence(bundle, tmp_path) == found
    assert "it diverges 1e+09 nats" in prefill_refusal(bundle.manifest, found)


def test_without_a_folder_for_caches_nothing_is_known(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given: object) -> Path:
        raise InputError("there is no folder for caches")

    monkeypatch.setattr(
        "stem_edge.runtime.backends.onnxruntime.prefill_exactness.cache_folder", fails
    )
    assert stem_edge.memory_plan(quantized, prepare=False).prefill_refused == ""


def test_a_bundle_whose_promise_does_not_hold(
    quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts go through the other graphs; plan, figures and command say so."""
    bundle = promising(quantized, tmp_path / "b", 0.0)
    # Because nobody has measured it.
    assert stem_edge.memory_plan(bundle.path, cache_dir=tmp_path).prefill_refused == ""
    with stem_edge.load(quantized) as model:  # a bundle as exact as it says
        model.generate_text(PROMPT, max_new_tokens=1)
        assert model.plan.prefill_refused == "" and "prefill graph" not in model.stats.line()
    with stem_edge.load(bundle.path, prefill_graph=False) as model:
        expected = model.logits(model.tokenize(PROMPT))
    with stem_edge.load(bundle.path) as model:
        assert np.array_equal(model.logits(model.tokenize(PROMPT)), expected)
        said = model.plan.prefill_refused
        assert "from the decoding graph on this processor, and 0 where it was exp" in said
        assert model.stats.line().endswith(f"; prefill graph not used: {said}")
        assert model.stats.to_dict()["prefill_refused"] == said
    with stem_edge.load(bundle.path) as model:
        assert model.plan.prefill_refused == said
    with stem_edge.load(bundle.path, prefill_graph=True) as model:  # because it is asked for
        assert model.plan.prefill_refused == ""
        assert not np.array_equal(model.logits(model.tokenize(PROMPT)), expected)
    assert stem_edge.memory_plan(bundle.path).prefill_refused == said
    assert main(["inspect", str(bundle.path), "--memory"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_where_all_matrices_do_not_fit_together(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts go through the graphs that decode, unless the other is asked for."""
    stem_edge.load(quantized).close()  # which measures it
    found = footprint_of(open_bundle(quantized).manifest)
    both = found.step_nbytes + found.prefill_nbytes
    for limit, words in ((both, ""), (both - 1, "its matrices would take")):
        monkeypatch.setattr(loader, "memory_limit", lambda limit=limit: limit)
        assert stem_edge.memory_plan(quantized).prefill_refused.startswith(words)
        with stem_edge.load(quantized) as model:
            assert bool(model.plan.prefill_refused) == bool(words)
    with stem_edge.load(quantized, prefill_graph=True) as model:
        assert model.plan.prefill_refused == ""
