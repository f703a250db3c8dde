"""The accelerator that an execution provider runs on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from stem_edge.runtime.backends.onnxruntime.providers.resolve import describe, resolve
from stem_edge.runtime.backends.options import Providers
from stem_edge.system.nvidia import about_nvidia

# Vulkan drivers that compute in software, and "CPU", which onnxruntime lists if it finds no GPU.
SOFTWARE = re.compile(r"llvmpipe|lavapipe|lvp|swiftshader|\bcpu\b", re.IGNORECASE)
# Vendor and device id of SwiftShader's display adapter.
SOFTWARE_IDS = (0x1AE0, 0xC0DE)
NVIDIA = ("cuda", "tensorrt")
VULKAN_DRIVER = "VK_DRIVER_FILES"  # the driver that the Vulkan loader must use


def about_accelerator(
    providers: Providers, libraries: Mapping[str, str | Path] | None = None
) -> dict[str, str]:
    """Return provider, device and driver as far as they are known, and if the device is software.

    Raises what resolving providers raises.
    """
    first = resolve(providers, libraries)[0]
    found = {"provider": first.name}
    if first.on_cpu:
        return found | {"device": "cpu", "software": "yes"}
    ids = None
    if first.devices:
        device, hardware = first.devices[0], first.devices[0].device
        ids, listed = (hardware.vendor_id, hardware.device_id), describe(device)
        vendor = "" if listed.vendor in listed.name else listed.vendor
        found["device"] = " ".join(word for word in (listed.kind, vendor, listed.name) if word)
        if version := {**device.ep_metadata, **hardware.metadata}.get("version"):
            found["plug-in"] = str(version)
    elif first.name in NVIDIA:
        found |= about_nvidia(first.options.get("device_id", "0"))
    driver = os.environ.get(VULKAN_DRIVER, "") if first.name == "webgpu" else ""
    software = ids == SOFTWARE_IDS or SOFTWARE.search(f"{found.get('device', '')} {driver}")
    found |= {"driver": driver} if driver else {}
    return found | {"software": "yes" if software else "no"}
