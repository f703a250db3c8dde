"""tools/software_gpu.py: what it refuses, and that a command sees a GPU on an unchanged machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import software_gpu
from software_gpu import RefusedError, command_line, driver, environment

PROGRAM = Path(software_gpu.__file__)
SECONDS = 120


def possible() -> str:
    """Return why no software GPU is possible here; an empty text if it is."""
    try:
        command_line([])
        driver()
    except RefusedError as refused:
        return str(refused)
    return ""


WHY_NOT = possible()


def test_only_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RefusedError, match="this is win32; a software GPU needs Linux"):
        command_line(["true"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is refused before")
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RefusedError, match="unshare is not installed; it is in util-linux"):
        command_line(["true"])
    refuses = tmp_path / "unshare"
    refuses.write_text("#!/bin/sh\necho 'Operation not' permitted >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(refuses))
    with pytest.raises(RefusedError, match=r"\(Operation not permitted\); run this as root"):
        command_line(["true"])
    monkeypatch.setattr(software_gpu, "SYS_CLASS", tmp_path / "none")
    with pytest.raises(RefusedError, match="none is missing; mount sysfs"):
        command_line(["true"])


def test_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(RefusedError, match=r"libvulkan\.so\.1.*apt-get install"):
        driver()
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libvulkan.so.1")
    with pytest.raises(RefusedError, match=r"is not installed; .*mesa-vulkan-drivers"):
        driver([tmp_path])
    (tmp_path / "lvp_icd.x86_64.json").touch()
    assert driver([tmp_path]) == tmp_path / "lvp_icd.x86_64.json"


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_gpu, "driver", lambda: Path("/usr/lvp.json"))
    found = environment({"PATH": "/bin"})
    assert found["VK_DRIVER_FILES"] == str(Path("/usr/lvp.json")) and found["XDG_RUNTIME_DIR"]
    given = {"VK_DRIVER_FILES": "/own.json", "XDG_RUNTIME_DIR": "/run/1"}
    assert environment(given) == given


def test_without_a_command_it_explains_itself() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "software GPU" in done.stdout


@pytest.mark.skipif(bool(WHY_NOT), reason=f"no software GPU here: {WHY_NOT}")
def test_a_command_sees_a_gpu_and_else_the_same_machine() -> None:
    code = (
        "import json, os, stem_edge.system.memory as m; from pathlib import Path;"
        "print(json.dumps([os.listdir('/sys/class/drm'), str(m.memory_cgroup()),"
        " sorted(set(os.listdir('/sys/class')) - {'drm'}), os.listdir('/sys/class/net'),"
        " Path('/sys/class/drm/card0/device/vendor').read_text()]))"
    )
    line = [sys.executable, str(PROGRAM), sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=SECONDS)
    cards, cgroup, classes, network, vendor = json.loads(done.stdout)
    from stem_edge.system.memory import memory_cgroup

    assert (cards, vendor) == (["card0"], "0x1ae0\n")
    assert cgroup == str(memory_cgroup())
    assert classes == sorted(set(os.listdir("/sys/class")) - {"drm"})  # noqa: PTH208
    assert sorted(network) == sorted(os.listdir("/sys/class/net"))  # noqa: PTH208
    assert subprocess.run([*line[:2], "sh", "-c", "exit 7"], check=False).returncode == 7


@pytest.mark.skipif(bool(WHY_NOT), reason=f"no software GPU here: {WHY_NOT}")
@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_webgpu") is None, reason="[webgpu] is not installed"
)
def test_webgpu_can_be_used_on_it() -> None:
    inspect = [sys.executable, "-m", "stem_edge", "inspect", "--providers", "--json"]
    line = [sys.executable, str(PROGRAM), *inspect]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=SECONDS)
    (webgpu,) = [each for each in json.loads(done.stdout) if each["name"] == "webgpu"]
    assert webgpu["available"] and webgpu["own_memory"]
    assert [device["kind"] for device in webgpu["devices"]] == ["GPU"]
