"""Memory by kind: reports match what programs allocate, and the kernel's totals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from programs import LINUX, SIZE, Program

from stem_edge.system.process_memory import Memory, MemoryReader

# Unlinked at once, so that nothing is left when the program is killed.
SEGMENT = (
    "from multiprocessing.shared_memory import SharedMemory; "
    f"s = SharedMemory(None, True, {SIZE}); b = s.buf; s.unlink()"
)


@pytest.fixture
def backbone(tmp_path: Path) -> list[Path]:
    return [tmp_path / "bundle", tmp_path / "kept"]


def a_file(path: Path, nbytes: int = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)  # a sparse file, because holes are mapped like other pages
    return path


def growth(before: Memory, after: Memory) -> dict[str, int]:
    """Kinds of memory that changed by more than 2 % of what these programs take at a time."""
    pairs = {name: vars(after)[name] - nbytes for name, nbytes in vars(before).items()}
    return {name: nbytes for name, nbytes in pairs.items() if abs(nbytes) > 0.02 * SIZE}


def kernel_resident(pid: int) -> tuple[int, int]:
    """Rss of smaps_rollup and VmRSS of status."""
    found = []
    for file, name in (("smaps_rollup", "Rss:"), ("status", "VmRSS:")):
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith(name)]
    return found[0], found[1]


@LINUX
def test_the_kinds_add_up_to_what_the_kernel_says(
    program: Program, backbone: list[Path], tmp_path: Path
) -> None:
    reader = MemoryReader(program.pid, backbone)
    program.map_file(a_file(tmp_path / "some.bin"))
    program.do(f"held.append(b'x' * {SIZE})")
    program.do(f"s = mmap.mmap(-1, {SIZE}); s[:] = b'x' * len(s)")
    memory = reader.memory()
    in_ram = sum(nbytes for kind, nbytes in vars(memory).items() if kind != "swap")
    for resident in kernel_resident(program.pid):
        assert in_ram == pytest.approx(resident, rel=0.02)
    assert reader.unevictable() == pytest.approx(memory.unevictable, rel=0.02)
    assert memory.libraries  # at least the interpreter


@LINUX
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("bundle/backbone.onnx.data", "backbone"),
        ("kept/prepared.onnx.data", "backbone"),
        ("kept-not/a.sorted", "other_files"),
        ("lib/libfoo-2.so.1.0", "libraries"),
        ("bin/python", "libraries"),
    ],
)
def test_a_mapped_file_is_of_its_kind(
    program: Program, backbone: list[Path], tmp_path: Path, place: str, kind: str
) -> None:
    reader, path = MemoryReader(program.pid, backbone), a_file(tmp_path / place)
    before = reader.memory()
    program.map_file(path)
    expected = {kind: pytest.approx(SIZE, rel=0.02)}
    assert growth(before, reader.memory()) == expected
    path.unlink()  # " (deleted)"
    assert growth(before, reader.memory()) == expected


TOUCH = f"for at in range(0, {SIZE}, 4096): b[at] = 1"


@LINUX
@pytest.mark.parametrize(
    ("before", "line", "grown"),
    [
        ("pass", f"held.append(b'x' * {SIZE})", {"anonymous": SIZE}),  # a leak
        (  # because written pages of a private mapping no longer belong to the file
            "b = m",
            f"for at in range(0, {SIZE // 2}, 4096): b[at] = 1",
            {"backbone": -SIZE // 2, "anonymous": SIZE // 2},
        ),
        (
            f"b = mmap.mmap(-1, {SIZE}, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)",
            TOUCH,
            {"shared": SIZE},
        ),
        (SEGMENT, TOUCH, {"shared": SIZE}),
        (
            f"import os; d = os.memfd_create('x'); os.ftruncate(d, {SIZE}); b = mmap.mmap(d, {SIZE})",
            TOUCH,
            {"shared": SIZE},
        ),
    ],
)
def test_what_a_program_takes_is_of_its_kind(
    program: Program,
    backbone: list[Path],
    tmp_path: Path,
    before: str,
    line: str,
    grown: dict[str, int],
) -> None:
    reader, path = (
        MemoryReader(program.pid, backbone),
        a_file(tmp_path / "bundle/backbone.onnx.data"),
    )
    program.map_file(path, "ACCESS_COPY")
    program.do(before)
    memory = reader.memory()
    program.do(line)
    found = growth(memory, reader.memory())
    assert found == {kind: pytest.approx(nbytes, rel=0.02) for kind, nbytes in grown.items()}


@pytest.mark.parametrize("waited", [False, True])
def test_a_process_that_has_ended(backbone: list[Path], waited: bool) -> None:
    program = Program()
    reader = MemoryReader(program.pid, backbone)
    with program.process:
        assert reader.memory().anonymous
        program.process.kill()
        if sys.platform == "linux":  # until it is a zombie
            while psutil.Process(program.pid).status() != psutil.STATUS_ZOMBIE:
                pass
        if waited or sys.platform != "linux":
            program.process.wait()
        asked: list[Callable[[], object]] = [reader.memory, reader.unevictable]
        for ask in asked:
            with pytest.raises(OSError):
                ask()
    with pytest.raises(ProcessLookupError):
        MemoryReader(program.pid, backbone)
