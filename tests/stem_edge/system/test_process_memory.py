"""Memory by kind: reports match what programs allocate, and the kernel's totals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from programs import LINUX, SIZE, Program

from stem_edge.system.process_memory import (
    FileKinds,
    LinuxReader,
    Memory,
    MemoryReader,
    open_reader,
)

# Unlinked at once, so that nothing is left when the program is killed.
SEGMENT = (
    "from multiprocessing.shared_memory import SharedMemory; "
    f"s = SharedMemory(None, True, {SIZE}); b = s.buf; s.unlink()"
)


@pytest.fixture
def kinds(tmp_path: Path) -> FileKinds:
    return FileKinds(tmp_path / "bundle" / "tables.zarr", (tmp_path / "bundle", tmp_path / "kept"))


def a_file(path: Path, nbytes: int = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)  # a sparse file, because holes are mapped like other pages
    return path


def growth(before: Memory, after: Memory) -> dict[str, int]:
    """Kinds of memory that changed by more than 2 % of what these programs take at a time."""
    pairs = {name: after.kinds()[name] - nbytes for name, nbytes in before.kinds().items()}
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
    program: Program, kinds: FileKinds, tmp_path: Path
) -> None:
    reader = LinuxReader(program.pid, kinds)
    program.map_file(a_file(tmp_path / "some.bin"))
    program.do(f"held.append(b'x' * {SIZE})")
    program.do(f"s = mmap.mmap(-1, {SIZE}); s[:] = b'x' * len(s)")
    memory, totals = reader.memory(), reader.totals()
    for resident in kernel_resident(program.pid):
        assert memory.resident == pytest.approx(resident, rel=0.02)
    assert totals.resident == pytest.approx(memory.resident, rel=0.02)
    assert totals.unevictable == pytest.approx(memory.unevictable, rel=0.02)
    assert memory.libraries  # at least the interpreter


@LINUX
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("bundle/tables.zarr/c/0", "tables"),
        ("bundle/backbone.onnx.data", "backbone"),
        ("kept/prepared.onnx.data", "backbone"),
        ("kept-not/a.sorted", "other_files"),
        ("lib/libfoo-2.so.1.0", "libraries"),
        ("bin/python", "libraries"),
    ],
)
def test_a_mapped_file_is_of_its_kind(
    program: Program, kinds: FileKinds, tmp_path: Path, place: str, kind: str
) -> None:
    reader, path = LinuxReader(program.pid, kinds), a_file(tmp_path / place)
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
    kinds: FileKinds,
    tmp_path: Path,
    before: str,
    line: str,
    grown: dict[str, int],
) -> None:
    reader, path = LinuxReader(program.pid, kinds), a_file(tmp_path / "bundle/backbone.onnx.data")
    program.map_file(path, "ACCESS_COPY")
    program.do(before)
    memory = reader.memory()
    program.do(line)
    found = growth(memory, reader.memory())
    assert found == {kind: pytest.approx(nbytes, rel=0.02) for kind, nbytes in grown.items()}


SMAPS = """\
55d0a000-55d0b000 r-xp 00000000 fd:00 11                    /usr/bin/python3.11
Size:                  8 kB
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me sd
55d0b000-55d0c000 rw-p 00000000 fd:00 11                    /usr/lib/libx.so.6 (deleted)
Rss:                  16 kB
Pss:                  16 kB
Anonymous:             4 kB
Swap:                  3 kB
55d1a000-55d1b000 rw-p 00000000 00:00 0                     [heap]
Rss:                4096 kB
Anonymous:          4096 kB
AnonHugePages:      2048 kB
Swap:                100 kB
SwapPss:             100 kB
7f00a000-7f00b000 rw-p 00000000 00:00 0 
Rss:                  32 kB
Anonymous:            32 kB
7f00b000-7f00c000 r--s 00000000 fd:00 12                    {bundle}/tables.zarr/c/0
Rss:                  64 kB
FilePmdMapped:        64 kB
7f00c000-7f00d000 r--s 00000000 fd:00 13                    {bundle}/a\\012b.data
Rss:                 128 kB
7f00d000-7f00e000 rw-s 00000000 00:01 14                    /memfd:x (deleted)
Rss:                 256 kB
Swap:               1000 kB
7f00e000-7f00f000 rw-s 00000000 00:01 15                    [anon_shmem:y]
Rss:                   1 kB
7f00f000-7f010000 rw-p 00000000 00:0f 16                    /anon_hugepage (deleted)
Rss:                   0 kB
Private_Hugetlb:    2048 kB
7f010000-7f011000 r--p 00000000 fd:00 17                    /data/notes.something
Rss:                 512 kB
"""
STATUS = "Name:\tVmRSS: 7 kB\xff\nVmHWM:\t 9000 kB\nVmRSS:\t 5113 kB\n"


@pytest.fixture
def fake(tmp_path: Path) -> LinuxReader:
    (tmp_path / "proc/7").mkdir(parents=True)
    bundle = tmp_path.resolve() / "bundle"
    (tmp_path / "proc/7/smaps").write_text(SMAPS.replace("{bundle}", str(bundle)))
    status = STATUS + "RssAnon:\t 4132 kB\nVmSwap:\t 103 kB\n"
    (tmp_path / "proc/7/status").write_text(status, "latin-1")
    return LinuxReader(7, FileKinds(bundle / "tables.zarr", (bundle,)), tmp_path / "proc")


def test_every_field_of_a_known_process(fake: LinuxReader) -> None:
    memory = fake.memory()
    assert {name: nbytes >> 10 for name, nbytes in memory.kinds().items()} == {
        "anonymous": 4 + 4096 + 32,
        "swap": 3 + 100,  # not that of shared memory
        "backbone": 128,
        "tables": 64,
        "libraries": 8 + 12,
        "other_files": 512,
        "shared": 257,
    }
    assert memory.resident >> 10 == 8 + 16 + 4096 + 32 + 64 + 128 + 257 + 512
    assert memory.unevictable >> 10 == 4132 + 103
    assert (fake.totals().unevictable, fake.totals().resident) == (4235 << 10, 5113 << 10)


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("portable", [False, True])
def test_a_process_that_has_ended(kinds: FileKinds, waited: bool, portable: bool) -> None:
    program = Program()
    reader = MemoryReader(program.pid) if portable else open_reader(program.pid, kinds)
    with program.process:
        assert reader.memory().resident
        program.process.kill()
        if sys.platform == "linux":  # until it is a zombie
            while psutil.Process(program.pid).status() != psutil.STATUS_ZOMBIE:
                pass
        if waited or sys.platform != "linux":
            program.process.wait()
        asked: list[Callable[[], object]] = [reader.memory, reader.totals]
        for ask in asked:
            with pytest.raises(OSError):
                ask()
    with pytest.raises(ProcessLookupError):
        MemoryReader(program.pid)
