"""Limits of measured processes: cgroups of both versions. Profiles of devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stem_edge.apps.measuring import limits
from stem_edge.apps.measuring.device_profiles import DEVICES, find_device
from stem_edge.apps.measuring.limits import limited
from stem_edge.apps.measuring.runs import workers
from stem_edge.apps.measuring.runs.workers import Subject, WorkerProcess
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.runtime.rows.emulated_flash import PROFILES
from stem_edge.system.memory import memory_cgroup

LIMIT = 64 << 20
REMOVE = Path.rmdir
HUNGRY = """
import sys
for line in sys.stdin:
    held = b"x" * (256 << 20)
    print("{}", flush=True)
"""


@pytest.fixture
def child() -> Iterator[int]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that vanish with their files, as those of cgroups do."""

    def remove(folder: Path) -> None:
        if folder.name.startswith("stem-edge-"):
            shutil.rmtree(folder)
        else:
            REMOVE(folder)

    monkeypatch.setattr(Path, "rmdir", remove)
    return tmp_path


def use_group(monkeypatch: pytest.MonkeyPatch, found: tuple[Path, int] | None) -> None:
    monkeypatch.setattr(limits, "memory_cgroup", lambda: found)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


BOTH = {"memory.limit_in_bytes": str(64 << 20), "memory.memsw.limit_in_bytes": str(64 << 20)}


@pytest.mark.parametrize(
    ("version", "place", "files"),
    [(1, "app/own.scope", BOTH), (2, "app", {"memory.max": str(64 << 20), "memory.swap.max": "0"})],
)
def test_a_group_is_made_where_memory_is_handed_down(
    child: int,
    groups: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    place: str,
    files: dict[str, str],
) -> None:
    (groups / "app/own.scope").mkdir(parents=True)
    (groups / "cgroup.subtree_control").write_text("memory")
    (groups / "app/cgroup.subtree_control").write_text("cpu memory pids\n")
    (groups / "app/own.scope/cgroup.subtree_control").write_text("\n")
    use_group(monkeypatch, (groups / "app/own.scope", version))
    with limited(LIMIT) as confine:
        confine(child)
        made = groups / place / f"stem-edge-{os.getpid()}"
        assert contents(made) == files | {"cgroup.procs": str(child)}
    assert not list(groups.rglob("stem-edge-*"))


def test_a_worker_that_takes_too_much_is_killed_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "COMMAND", HUNGRY)
    subject, group = Subject("hungry", "stem-edge", "x"), memory_cgroup()
    parent = group and limits._parent(*group)
    try:
        with (
            limited(LIMIT) as confine,
            WorkerProcess(subject, confine) as worker,
            pytest.raises(StemEdgeError, match=r"hungry .* in phase start: .*out of memory"),
        ):
            worker.ask("start", "start")
    except InputError as error:
        pytest.skip(str(error))
    assert parent is not None and not list(parent.glob(f"stem-edge-{os.getpid()}*"))


def test_devices_are_complete_and_found_by_name() -> None:
    for name, device in DEVICES.items():
        assert find_device(name) is device
        assert (
            device.flash in PROFILES
            and 1e9 <= device.memory <= 64e9
            and 1 <= device.cpus <= 16 < device.bandwidth
        )
    with pytest.raises(InputError, match=r"'pi9' is not known; expected one of .*pi5"):
        find_device("pi9")
