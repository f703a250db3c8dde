"""What an execution provider runs on, in words, and what a process holds there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stem_edge.runtime.options import Providers

NAME_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
MEMORY_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
SECONDS = 10.0
# Names of Vulkan in software, and what onnxruntime lists where there is nothing but the CPU.
SOFTWARE = re.compile(r"llvmpipe|lavapipe|lvp|swiftshader|\bcpu\b", re.IGNORECASE)
# The display adapter of SwiftShader, and the stand-in of tools/software_gpu.py.
SOFTWARE_IDS = (0x1AE0, 0xC0DE)
# Of what onnxruntime tells of a device, the first that is there: its own word, and OpenVINO's.
NAMES = ("Description", "FULL_DEVICE_NAME")
NVIDIA = ("cuda", "tensorrt")
VULKAN_DRIVER = "VK_DRIVER_FILES"  # that the Vulkan loader was told to take


def about_accelerator(
    providers: Providers, libraries: Mapping[str, str | Path] | None = None
) -> dict[str, str]:
    """Provider, device and driver as far as they are known, and whether it is a device at all.

    Raises what resolving providers raises.
    """
    from stem_edge.runtime.providers import resolve

    first = resolve(providers, libraries)[0]
    found = {"provider": first.name}
    if first.on_cpu:
        return found | {"device": "cpu", "software": "yes"}
    device = first.devices[0] if first.devices else None
    if device is not None:
        found |= _listed(device)
    elif first.name in NVIDIA:
        found |= about_nvidia(first.options.get("device_id", "0"))
    ids = None if device is None else (device.device.vendor_id, device.device.device_id)
    driver = os.environ.get(VULKAN_DRIVER, "") if first.name == "webgpu" else ""
    software = ids == SOFTWARE_IDS or SOFTWARE.search(f"{found.get('device', '')} {driver}")
    return (
        found | ({"driver": driver} if driver else {}) | {"software": "yes" if software else "no"}
    )


def about_nvidia(device_id: str) -> dict[str, str]:
    """Name and driver of an NVIDIA GPU; nothing where its driver does not tell."""
    name, _, driver = "".join(_ask_nvidia(*NAME_QUERY, f"--id={device_id}")[:1]).rpartition(",")
    return {"device": name.strip(), "driver": driver.strip()} if name else {}


def device_nbytes(pid: int, providers: Providers) -> int | None:
    """Bytes on NVIDIA GPUs; 0 if none is used, None where nobody tells. providers: as of load.

    The driver lists what computes by CUDA, by the ids outside of a container.
    """
    if providers is None:
        return 0
    pairs = [line.partition(", ")[::2] for line in _ask_nvidia(*MEMORY_QUERY)]
    held = [int(used) << 20 for owner, used in pairs if owner == str(pid) and used.isdigit()]
    return sum(held) if held else None


def _ask_nvidia(*query: str) -> list[str]:
    """Lines of the driver's answer; none where there is no driver, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _listed(device: Any) -> dict[str, str]:
    """Kind, vendor, name or numbers of an OrtEpDevice, as onnxruntime lists them."""
    hardware = device.device
    told = {**device.ep_metadata, **hardware.metadata}
    ids = f"{hardware.vendor_id:#06x}:{hardware.device_id:#06x}"
    name = next((str(told[key]) for key in NAMES if told.get(key)), ids)
    vendor = str(hardware.vendor)
    said = (str(hardware.type.name), "" if vendor in name else vendor, name)
    words = {"device": " ".join(word for word in said if word)}
    return words | ({"plug-in": str(told["version"])} if told.get("version") else {})
