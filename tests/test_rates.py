"""The probes inside the package are those that tools/make_probes.py writes, and can be timed."""

from __future__ import annotations

import sys
from pathlib import Path

import make_probes
import pytest

from stem_edge.formats import BackboneFormat
from stem_edge.measuring.rates import derived_rates
from stem_edge.measuring.rates_ort import PROBES, matmul_probe, ort_rates
from stem_edge.runtime.ort_session import new_session, open_session
from stem_edge.runtime.providers import CPU


def test_the_probes_are_what_the_tool_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_probes.py", str(tmp_path)])
    make_probes.main()
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in PROBES.iterdir()}


def test_weights_of_a_probe_are_not_folded_into_one(tmp_path: Path) -> None:
    """Equal constants become one, which then stays in the processor's cache: far too fast."""
    saved = tmp_path / "probe.onnx"
    new_session(PROBES / matmul_probe(4, 128), 1, [CPU], save_to=saved)
    assert saved.stat().st_size > 120 << 20


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8", "fp32"])
def test_rates_of_this_machine(weights: str) -> None:
    backbone = BackboneFormat(weights=weights, head="int4", block_size=48)  # type: ignore[arg-type]
    found = ort_rates(backbone, threads=1)
    assert 1e7 < found.kv < 1e12
    assert 1e8 < found.weights < 1e12
    assert 1e-6 < found.layer_seconds < 0.1
    assert found.source == "measured on this machine, 1 threads"


def test_rates_of_a_device_follow_from_its_bandwidth() -> None:
    slow, fast = derived_rates(1e9, "a"), derived_rates(2e9, "b")
    assert fast.weights == 2 * slow.weights == 1.6e9
    assert fast.kv == 2 * slow.kv
    assert fast.source == "from 2 GB/s of memory bandwidth, b"


def test_every_block_size_has_a_probe() -> None:
    for bits, block in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (32, 0)):
        assert (PROBES / matmul_probe(bits, block)).is_file()
    assert open_session(PROBES / matmul_probe(32, 0), 1, [CPU]).get_inputs()[0].name == "x"
