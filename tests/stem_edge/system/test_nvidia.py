"""What NVIDIA's driver says, and which devices are software."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stem_edge.runtime.backends.onnxruntime.providers import about
from stem_edge.system import nvidia

POSIX = pytest.mark.skipif(os.name != "posix", reason="programs are scripts on POSIX systems")


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
