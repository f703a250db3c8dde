"""Run a command with a software GPU (Vulkan), so that onnxruntime finds one on any Linux machine.

    python tools/software_gpu.py stem-edge inspect --providers
    python tools/software_gpu.py pytest tests/whole_model/test_gpus.py

onnxruntime offers its WebGPU plug-in a device only if the system shows a display adapter. So the
command gets its own view of /sys/class/drm with a made-up adapter; the rest of /sys stays the same, and
other programs see no change. The plug-in then computes on Mesa's lavapipe, which runs Vulkan on the
CPU, unless VK_DRIVER_FILES names another driver. Results are those of a GPU; speed is not.

Linux only; as root, or where users may create namespaces.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

SYS_CLASS = Path("/sys/class")
DRIVER_FOLDERS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))
DRIVER_FILES = "lvp_icd*.json"
CHOSEN_DRIVER = "VK_DRIVER_FILES"  # read by the Vulkan loader
RUNTIME_FOLDER = "XDG_RUNTIME_DIR"  # Mesa's driver does not start without one
PACKAGES = (
    "on Debian and Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers, 24 or newer (on Debian 12 "
    "from backports: apt-get install -t bookworm-backports mesa-vulkan-drivers)"
)
# /sys is read-only, so mount a writable folder over /sys/class and mount everything else back into it.
# Vendor and device are those of SwiftShader, another software Vulkan; the folder must be named like a
# PCI address, because onnxruntime parses it.
SCRIPT = """
set -e
before=$(mktemp -d)
mount --rbind /sys/class "$before"
mount -t tmpfs stand-in /sys/class
for each in "$before"/*; do
    name=${each##*/}
    [ "$name" = drm ] && continue
    mkdir "/sys/class/$name"
    mount --rbind "$each" "/sys/class/$name"
done
umount -l "$before"
rmdir "$before"
card=/sys/class/drm/card0
mkdir -p "$card/0000:ff:1f.0"
ln -s 0000:ff:1f.0 "$card/device"
echo 0x1ae0 > "$card/device/vendor"
echo 0xc0de > "$card/device/device"
echo 0x030000 > "$card/device/class"
exec "$@"
"""


class RefusedError(Exception):
    """The reason why no software GPU is possible here, in one line."""


def command_line(command: Iterable[str]) -> list[str]:
    """Wrap a command so that it sees the adapter. Raises RefusedError."""
    if sys.platform != "linux":
        raise RefusedError(f"this is {sys.platform}; a software GPU needs Linux")
    program = shutil.which("unshare")
    if program is None:
        raise RefusedError("unshare is not installed; it is in util-linux")
    if not SYS_CLASS.is_dir():
        raise RefusedError(f"{SYS_CLASS} is missing; mount sysfs at /sys")
    unshared = [program, "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    # Try it with `true` first, because a failure of the command itself would look the same.
    trial = [*unshared, "sh", "-c", SCRIPT, "sh", "true"]
    tried = subprocess.run(trial, capture_output=True, check=False)
    if tried.returncode:
        said = " ".join(tried.stderr.decode(errors="replace").split()) or "no reason given"
        raise RefusedError(f"creating a namespace is not allowed here ({said}); run this as root")
    return [*unshared, "sh", "-c", SCRIPT, "sh", *command]


def driver(folders: Iterable[Path] = DRIVER_FOLDERS) -> Path:
    """Find the file that describes Mesa's software driver. Raises RefusedError."""
    if ctypes.util.find_library("vulkan") is None:
        raise RefusedError(f"the Vulkan loader is not installed (libvulkan.so.1); {PACKAGES}")
    found = [path for folder in folders for path in sorted(folder.glob(DRIVER_FILES))]
    if not found:
        raise RefusedError(f"Mesa's software Vulkan driver is not installed; {PACKAGES}")
    return found[0]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the command's environment. Raises RefusedError if there is no driver."""
    chosen = given.get(CHOSEN_DRIVER) or str(driver())
    folder = given.get(RUNTIME_FOLDER) or tempfile.gettempdir()
    return {**given, CHOSEN_DRIVER: chosen, RUNTIME_FOLDER: folder}


def main() -> NoReturn:
    """Replace this process by the command, or exit with the reason why not."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if command else 2)
    try:
        variables = environment(os.environ)
        line = command_line(command)
    except RefusedError as refusal:
        sys.exit(f"software_gpu: {refusal}")
    os.execve(line[0], line, variables)


if __name__ == "__main__":
    main()
