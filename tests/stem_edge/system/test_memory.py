"""Free memory of the machine: cgroups of both versions, nested, with limits or without."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stem_edge.system import memory as machine


def cgroup(
    folder: Path, version: int, limit: str, used: int, inactive: int = 0, active: int = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }
    for name, value in zip(names[version], (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    total = "total_" if version == 1 else ""
    stat = f"anon 5\n{total}inactive_file {inactive}\n{total}active_file {active}\n"
    (folder / "memory.stat").write_text(stat)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    return tmp_path / "proc", tmp_path / "cgroup"


def left(system: tuple[Path, Path], lines: str) -> list[int]:
    (system[0] / "self/cgroup").write_text(lines)
    return [nbytes for _, nbytes in machine._limited_groups()]


def test_version_2_counts_every_level_above(system: tuple[Path, Path]) -> None:
    cgroup(system[1] / "a", 2, "1000", 700)
    cgroup(system[1] / "a/b", 2, "500", 100, inactive=50, active=20)
    assert left(system, "0::/a/b\n") == [470, 300]


def test_threads_are_no_more_than_the_cgroup_gives_time_of(system: tuple[Path, Path]) -> None:
    cgroup(system[1] / "a/b", 2, "max", 0)
    (system[0] / "self/cgroup").write_text("0::/a/b\n")
    for quota, cpus in (("max", machine.usable_cpus()), ("100000", 1), ("50000", 1)):
        (system[1] / "a/cpu.max").write_text(f"{quota} 100000\n")
        assert machine.usable_cpus() == cpus


def test_version_1(system: tuple[Path, Path]) -> None:
    cgroup(system[1] / "memory/job", 1, "2000", 500, inactive=100, active=200)
    lines = "3:cpu,cpuacct:/other\n2:memory:/job\n"
    assert left(system, lines) == [1800]


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, "9223372036854771712")])
def test_no_limit(system: tuple[Path, Path], version: int, limit: str) -> None:
    cgroup(system[1] / ("memory" if version == 1 else "."), version, limit, 700)
    assert left(system, "1:memory:/\n" if version == 1 else "0::/\n") == []


def test_inside_a_container_the_path_names_what_is_not_mounted(system: tuple[Path, Path]) -> None:
    cgroup(system[1], 2, "800", 300)
    assert left(system, "0::/docker/123\n") == [500]


def test_the_tightest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine.available_memory()
    assert before > 1 << 20
    monkeypatch.setattr(machine, "_limited_groups", lambda: [(88888, 12345), (77777, 66666)])
    assert machine.available_memory() == 12345
    assert machine.memory_limit() == 77777


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_own_memory_grows_with_what_is_written_and_shrinks_when_it_is_dropped() -> None:
    before = machine.own_memory()
    array = machine.own_pages((50, 1 << 18), np.float32)
    assert machine.own_memory() - before < 5 << 20
    array[:] = 1
    assert machine.own_memory() - before > 45 << 20
    del array
    assert machine.own_memory() - before < 5 << 20


FREED = """
import sys
import numpy as np
from stem_edge.system.memory import give_back_freed_blocks, own_memory
np.ones(30 << 20, np.uint8)  # from which on glibc keeps what is smaller
if len(sys.argv) > 1:
    give_back_freed_blocks(int(sys.argv[1]))
blocks = [np.ones(3 << 20, np.uint8) for _ in range(20)]
above, before = np.ones(1 << 20, np.uint8), own_memory()
del blocks
print(before - own_memory())
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="only glibc keeps blocks")
@pytest.mark.parametrize(("kept", "most"), [([], 5 << 20), (["1048576"], 1 << 30)])
def test_freed_blocks_are_given_back_at_once(kept: list[str], most: int) -> None:
    command = [sys.executable, "-c", FREED, *kept]
    found = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found < most
    assert not kept or found > 55 << 20


@pytest.mark.parametrize(
    "shape", [(0,), (3,), (1, 2, 100_000), (2, 1 << 20), (3, 1 << 20), (5, 1100_000)]
)
def test_pages_are_zeros_that_can_be_written(shape: tuple[int, ...]) -> None:
    array = machine.own_pages(shape, np.uint8)
    assert array.shape == shape
    assert array.dtype == np.uint8
    assert not array.any()
    array += 1
    assert array.all()
