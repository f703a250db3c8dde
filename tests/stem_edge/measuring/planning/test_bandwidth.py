"""What bounds a prediction: the bandwidth of memory, and the process before it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installed import DEMO

import stem_edge
from stem_edge.errors import InputError
from stem_edge.measuring.memory.device_profiles import find_device
from stem_edge.measuring.planning import process
from stem_edge.measuring.planning.bandwidth import bandwidth_of
from stem_edge.measuring.runs.workers import Subject, WorkerProcess
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.system.memory import TYPICAL_PROCESS_NBYTES


def test_a_bandwidth_is_given_or_that_of_a_device_or_measured() -> None:
    device = find_device("pi5")
    assert bandwidth_of(device, "2GB", 1) == (2e9, "2 GB/s, as given")
    assert bandwidth_of(device, None, 1) == (10e9, "10 GB/s, stated for pi5")
    here = bandwidth_of(None, None, 1)
    assert here.rate > 1e8 and here.source.endswith("measured on this machine, 1 threads")
    with pytest.raises(InputError, match="bandwidth is 17 bytes a second, which is too little"):
        bandwidth_of(None, 17, 1)


def test_a_token_reads_weights_keys_and_values_once() -> None:
    slow, fast = (stem_edge.fit(DEMO, "100MB", bandwidth=rate)[0] for rate in ("1GB", "2GB"))
    expected = slow.prediction
    read = expected.weights_per_token + expected.kv_per_token
    assert expected.decode_tokens_per_second == pytest.approx(1e9 / read)
    assert fast.prediction.decode_tokens_per_second == pytest.approx(2e9 / read)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is what is typical")
def test_a_process_is_measured_with_its_imports() -> None:
    bare = [sys.executable, "-c", "from stem_edge.system.memory import own_memory as n; print(n())"]
    least = int(subprocess.run(bare, capture_output=True, check=True).stdout)
    worker, generate = process.worker_nbytes("ggml"), process.generate_nbytes("ggml")
    assert least < worker < generate < process.generate_nbytes("onnxruntime")


def test_a_process_whose_engine_is_missing_is_typical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["ggml"], "module", "no_such_module")
    assert process.worker_nbytes("ggml") == TYPICAL_PROCESS_NBYTES


def test_no_module_of_the_current_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('a bundle ran')")
    monkeypatch.chdir(tmp_path)  # which may be a bundle
    process._imported.cache_clear()
    assert process.generate_nbytes("onnxruntime") != TYPICAL_PROCESS_NBYTES + process.SPARE_NBYTES
    with WorkerProcess(Subject("demo", "stem-edge", str(DEMO), {})) as worker:
        assert worker.start().seconds > 0
