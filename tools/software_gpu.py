"""Run a command where onnxruntime finds a GPU, on machines that have none: Vulkan in software.

    python tools/software_gpu.py stem-edge inspect --providers
    python tools/software_gpu.py pytest tests/whole_model/test_webgpu.py

onnxruntime offers its WebGPU plug-in a device only where the system shows a display adapter. So the
command gets a view of its own of /sys/class/drm, with an adapter that is none; everything else of
/sys stays, and other programs see no change. The plug-in then computes on what Vulkan brings: Mesa's
lavapipe, on the CPU, unless VK_DRIVER_FILES names another driver. What comes out is what a GPU would
compute; how fast says nothing about one.

Linux only; as root, or where users may make namespaces of their own.
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
CHOSEN_DRIVER = "VK_DRIVER_FILES"  # of the Vulkan loader
RUNTIME_FOLDER = "XDG_RUNTIME_DIR"  # Mesa's driver does not start without one
PACKAGES = (
    "on Debian and Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers, 24 or newer (on Debian 12 "
    "from backports: apt-get install -t bookworm-backports mesa-vulkan-drivers)"
)
# Mounts everything of /sys/class where it was, over a folder that can be written to. The vendor and
# device are those that SwiftShader, another Vulkan in software, shows; the folder is named like a
# place on a PCI bus, which onnxruntime looks at.
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
    """Why it is not possible here, in one line."""


def command_line(command: Iterable[str]) -> list[str]:
    """What runs a command beside the stand-in. Raises RefusedError."""
    if sys.platform != "linux":
        raise RefusedError(f"this is {sys.platform}; a GPU in software needs Linux")
    program = shutil.which("unshare")
    if program is None:
        raise RefusedError("unshare is not installed; it is in util-linux")
    if not SYS_CLASS.is_dir():
        raise RefusedError(f"{SYS_CLASS} is not there; mount sysfs at /sys")
    unshared = [program, "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    # Without a command, to see whether it may.
    trial = [*unshared, "sh", "-c", SCRIPT, "sh", "true"]
    tried = subprocess.run(trial, capture_output=True, check=False)
    if tried.returncode:
        said = " ".join(tried.stderr.decode(errors="replace").split()) or "it does not say why"
        raise RefusedError(f"a namespace of its own is not allowed here ({said}); run this as root")
    return [*unshared, "sh", "-c", SCRIPT, "sh", *command]


def driver(folders: Iterable[Path] = DRIVER_FOLDERS) -> Path:
    """The file that brings Mesa's driver in software to the Vulkan loader. Raises RefusedError."""
    if ctypes.util.find_library("vulkan") is None:
        raise RefusedError(f"Vulkan's loader is not installed (libvulkan.so.1); {PACKAGES}")
    found = [path for folder in folders for path in sorted(folder.glob(DRIVER_FILES))]
    if not found:
        raise RefusedError(f"Mesa's Vulkan driver in software is not installed; {PACKAGES}")
    return found[0]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The command's environment. Raises RefusedError where there is no driver."""
    chosen = given.get(CHOSEN_DRIVER) or str(driver())
    folder = given.get(RUNTIME_FOLDER) or tempfile.gettempdir()
    return {**given, CHOSEN_DRIVER: chosen, RUNTIME_FOLDER: folder}


def main() -> NoReturn:
    """See the module; takes the place of this process."""
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
