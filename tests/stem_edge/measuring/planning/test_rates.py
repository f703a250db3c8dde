"""Rates: measured here with graphs of single operators, and derived for other machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import DEMO

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import open_bundle
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat
from stem_edge.measuring.planning.rates import derived_rates
from stem_edge.measuring.planning.rates_ort import ort_rates, products
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session


def test_weights_of_a_probe_are_not_folded_into_one(tmp_path: Path) -> None:
    """Equal constants become one, which then stays in the processor's cache: far too fast."""
    saved = tmp_path / "probe.onnx"
    new_session(encode(products(4, 128)), 1, [CPU], save_to=saved)
    assert saved.stat().st_size > 120 << 20


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8", "fp32"])
def test_rates_of_this_machine(weights: str) -> None:
    backbone = BackboneFormat(weights=weights, head="int4", block_size=48)  # type: ignore[arg-type]
    found = ort_rates(backbone, "int8", threads=1)
    assert 1e7 < found.kv < 1e12
    assert 1e8 < found.weights < 1e12
    assert 1e-6 < found.layer_seconds < 0.1
    assert found.source == "measured on this machine, 1 threads"


def test_rates_of_a_device_follow_from_its_bandwidth() -> None:
    footprint = footprint_of(open_bundle(DEMO).manifest)
    slow, fast = (derived_rates(n, who, footprint) for n, who in ((1e9, "a"), (2e9, "b")))
    assert fast.weights == 2 * slow.weights == 1.6e9
    assert fast.kv == 2 * slow.kv
    assert fast.source == "from 2 GB/s of memory bandwidth, b"
