"""`stem-edge bench` on devices: subjects and counters, but never speeds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from installed import DEMO

from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.graph.device.rows import DeviceRows
from stem_edge.measuring.bench.bench import bench
from stem_edge.measuring.bench.figures import Report
from stem_edge.measuring.bench.report import report_table
from stem_edge.measuring.bench.subjects import UNLIMITED, Common, load_options, make_subjects
from stem_edge.runtime.backends.onnxruntime.providers import about
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.system import nvidia

BUNDLE = open_bundle(DEMO)
SLOTS = 40
POSIX = pytest.mark.skipif(os.name != "posix", reason="programs are scripts on POSIX systems")


@pytest.fixture(scope="module")
def report() -> Report:
    return bench(
        DEMO,
        against=["resident", "cpu"],
        prompt_tokens=60,
        new_tokens=20,
        rounds=2,
        loads=0,
        slots=SLOTS,
        device_memory="1GB",
    )


@pytest.mark.slow
def test_devices_are_counted_and_the_cpu_is_not(report: Report) -> None:
    flash, resident, cpu = (report.subjects[n].on_device for n in ("bundle", "resident", "cpu"))
    assert flash is not None and resident is not None and cpu is None
    layout = BUNDLE.manifest.tables
    assert layout is not None
    assert (flash.slots, resident.slots) == (SLOTS, layout.records)
    nbytes = (layout.records - SLOTS) * DeviceRows(layout, "fp32").slot_nbytes
    assert resident.allocated - flash.allocated == nbytes
    assert resident.row_cache_planned - flash.row_cache_planned == nbytes
    assert 0 < flash.allocated < flash.planned
    assert flash.driver_says is None
    assert flash.about == {"provider": "cpu", "device": "cpu", "software": "yes", "variant": "fp32"}


@pytest.mark.slow
def test_uploads_are_of_what_missed(report: Report) -> None:
    bundle, flash = report.subjects["bundle"], report.subjects["bundle"].on_device
    resident = report.subjects["resident"].on_device
    assert flash is not None and resident is not None
    assert bundle.hit_rate is not None and bundle.hit_rate < 1
    assert flash.uploaded_rows_per_token == pytest.approx(1 - bundle.hit_rate)
    assert flash.uploaded_bytes_per_token > 0 < flash.uploaded_bytes_per_prompt_token
    assert resident.uploaded_bytes_per_token == resident.uploaded_bytes_per_prompt_token == 0
    assert report.subjects["resident"].hit_rate == 1


@pytest.mark.slow
def test_the_table_has_devices_and_no_bandwidth_of_the_cpu(report: Report) -> None:
    text = report_table(report)
    assert (report.bandwidth, report.bandwidth_reached) == ([], None)
    assert "bandwidth" not in text
    assert f"in {SLOTS} slots)" in text
    assert "bundle / resident: decode " in text and "bundle / cpu: decode " in text
    assert json.loads(json.dumps(asdict(report)))["settings"]["options"]["slots"] == SLOTS


def test_options_that_say_what_load_does_anyway_are_left_out() -> None:
    options = LoadOptions(slots=5, threads=2, provider_libraries={"cuda": Path("/x.so")})
    libraries = {"cuda": str(Path("/x.so"))}
    assert load_options(options) == {"slots": 5, "provider_libraries": libraries}
    with pytest.raises(TypeError, match="unexpected keyword argument 'slotz'"):
        bench(DEMO, slotz=5)  # type: ignore[call-arg]


def subjects(*against: str, **device: object) -> list[dict[str, object]]:
    common = Common(BUNDLE, "onnxruntime", {"slots": 20, **device})
    return [subject.options for subject in make_subjects(common, against)]


def test_resident_has_all_of_the_device_and_cpu_nothing_of_it() -> None:
    engine = {"engine": "onnxruntime"}
    device = {"providers": ["cuda"], "device_memory": "1GB"}
    bundle, resident, cpu, dense = subjects("resident", "cpu", f"dense={DEMO}", **device)
    assert bundle == dense == device | engine | {"slots": 20}
    assert resident == engine | {
        "providers": ["cuda"], "resident": True, "device_memory": UNLIMITED
    }  # fmt: skip
    assert cpu == engine | {"slots": 20}
    assert subjects("resident")[1] == engine | {"resident": True}


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    quick = [
        "--rounds",
        "1",
        "--loads",
        "0",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "2",
        "--slots",
        "30",
        "--json",
    ]
    assert main(["bench", str(DEMO), *quick, "--providers", "cpu", "--device-memory", "1GB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["subjects"]["bundle"]["on_device"]["slots"] == 30
    assert found["settings"]["options"]["device_memory"] == "1GB"


def test_an_unavailable_provider_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", str(DEMO), "--loads", "0", "--providers", "qnn"]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "qnn is not available" in said[0]


@POSIX
def test_what_nvidias_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in *compute-apps*) echo '7, 12';; *) echo 'H, 1, 595.1';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvidia.about_nvidia("0") == {"device": "H, 1", "driver": "595.1"}
    assert nvidia.nbytes_on_nvidia(7) == 12 << 20
    assert nvidia.nbytes_on_nvidia(8) is None  # in a container, processes have other numbers
    program.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia.about_nvidia("0") == {}
    assert nvidia.nbytes_on_nvidia(7) is None


@pytest.mark.parametrize(
    ("numbers", "named", "driver", "software"),
    [
        ((0x1AE0, 0xC0DE), {}, "", "yes"),
        ((0x10DE, 0x2330), {}, "", "no"),
        ((0x10DE, 0x2330), {}, "/usr/lvp_icd.json", "yes"),
        ((1, 2), {"Description": "llvmpipe (LLVM 15)"}, "", "yes"),
        ((1, 2), {"FULL_DEVICE_NAME": "SwiftShader Device"}, "", "yes"),
        ((1, 2), {"Description": "NVIDIA H100"}, "", "no"),
    ],
)
def test_software_is_told_from_hardware(
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, int],
    named: dict[str, str],
    driver: str,
    software: str,
) -> None:
    hardware = SimpleNamespace(
        type=SimpleNamespace(name="GPU"),
        vendor="",
        vendor_id=numbers[0],
        device_id=numbers[1],
        metadata=named,
    )
    device = SimpleNamespace(
        device=hardware, ep_metadata={"version": "0.4"}, memory_info=lambda kind: None
    )
    provider = SimpleNamespace(name="webgpu", on_cpu=False, devices=(device,), options={})
    monkeypatch.setattr(about, "resolve", lambda wanted, libraries: (provider,))
    monkeypatch.setenv("VK_DRIVER_FILES", driver)
    found = about.about_accelerator("webgpu")
    assert (found["provider"], found["software"], found["plug-in"]) == ("webgpu", software, "0.4")
    name = next(iter(named.values()), f"{numbers[0]:#06x}:{numbers[1]:#06x}")
    assert found["device"] == f"GPU {name}"
    assert found.get("driver", "") == driver
