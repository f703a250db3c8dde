"""Damaged files, full disks and kills: a prefix in a file is right, or it is a miss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefix_files import IDS, filled, found, prompt

import stem_edge
from stem_edge.runtime.prefixes.file import MOST_HEADER_NBYTES, PrefixFile, UnusableError
from stem_edge.runtime.prefixes.folder import PrefixFolder

COUNT = 130
POSIX = pytest.mark.skipif(os.name != "posix", reason="owners and modes of files are POSIX's")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a prefix, alone in its folder."""
    folder = tmp_path / "p"
    PrefixFolder(folder, "this").write(prompt(IDS[:COUNT]), COUNT, filled())
    (made,) = folder.iterdir()
    return made


def taken(path: Path) -> int:
    """Look for the prefix, as a model does that is loaded now; checks the values."""
    return found(PrefixFolder(path.parent, "this"), IDS, filled())


def test_flipped_bits(path: Path) -> None:
    whole = path.read_bytes()
    assert taken(path) == COUNT
    for at in [
        *range(0, 1200, 3),
        *range(1200, len(whole), 97),
        *range(len(whole) - 5, len(whole)),
    ]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        path.chmod(0o600)
        assert taken(path) == 0, at
    path.write_bytes(whole)
    assert taken(path) == COUNT


def test_cut_and_longer_files(path: Path) -> None:
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, 1000, len(whole) - 5, len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert taken(path) == 0
        assert not path.exists()  # it is ours, and of no use
    path.write_bytes(whole + b"0")
    assert taken(path) == 0


# Path into the header, and a value that cannot be there.
MALFORMED: list[tuple[tuple[object, ...], object]] = [
    ((), 5),
    ((), [1, 2, 3]),
    (("__metadata__",), 5),
    (("__metadata__",), []),
    (("__metadata__", "format"), "1"),
    (("__metadata__", "format"), []),
    (("__metadata__", "fill"), "x" * MOST_HEADER_NBYTES),
    (("token_ids",), None),
    (("token_ids", "dtype"), ["U32"]),
    (("token_ids", "dtype"), "F32"),
    (("token_ids", "shape"), None),
    (("token_ids", "shape"), [True]),
    (("token_ids", "shape"), [float("inf")]),
    (("token_ids", "shape"), [COUNT, 1]),
    (("token_ids", "shape"), [-COUNT]),
    (("token_ids", "shape"), [1 << 39]),
    (("token_ids", "data_offsets"), float("nan")),
    (("starts", "dtype"), "F32"),
    (("0000", "shape"), [1] * 100),
    (("crc32c", "shape"), [2]),
    (("9999",), {}),
]


@pytest.mark.parametrize(("at", "value"), MALFORMED, ids=str)
def test_malformed_headers(at: tuple[str, ...], value: object, path: Path) -> None:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = {"": json.loads(whole[8:end])}
    inner, keys = header, ["", *at]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    text = json.dumps(header[""]).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
    with pytest.raises(UnusableError):
        PrefixFile(path)


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from prefix_files import IDS, filled, prompt
from stem_edge.runtime.prefixes.folder import PrefixFolder
folder, context = PrefixFolder(Path({folder!r}), "this"), filled()
print("ready", flush=True)
for turn in range(1 << 30):
    folder.write(prompt([turn % {turns}, *IDS[1:{count}]]), {count}, context)
    for path in list(folder._files()):
        path.unlink(missing_ok=True)
        folder._files().clear()
"""


def writer(folder: Path, turns: int = 3) -> subprocess.Popen[str]:
    """Start a process that writes and removes prefixes for ever."""
    root = Path(stem_edge.__file__).parents[1]
    paths = [str(root), str(root / "tests" / "helpers")]
    code = WRITER.format(paths=paths, folder=str(folder), count=COUNT, turns=turns)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@POSIX
@pytest.mark.slow
def test_killed_while_writing(tmp_path: Path) -> None:
    for turn in range(12):
        process = writer(tmp_path / "p")
        time.sleep(0.02 + 0.013 * turn)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for ids in ([turn, *IDS[1:]] for turn in range(3)):
            assert found(PrefixFolder(tmp_path / "p", "this"), ids, filled()) in (0, COUNT)
    for temporary in (tmp_path / "p").glob(".*.tmp"):
        os.utime(temporary, (time.time() - 7200,) * 2)
    PrefixFolder(tmp_path / "p", "this").write(prompt(IDS), 400, filled())
    assert not list((tmp_path / "p").glob(".*.tmp"))


@pytest.mark.slow
def test_two_processes_use_one_folder(tmp_path: Path) -> None:
    process = writer(tmp_path / "p")
    try:
        seen = set()
        started = time.monotonic()
        # The other process needs a while to start on a busy machine.
        while time.monotonic() < started + (5 if COUNT in seen else 60):
            for ids in ([turn, *IDS[1:]] for turn in range(3)):
                seen.add(found(PrefixFolder(tmp_path / "p", "this"), ids, filled()))
        assert seen <= {0, COUNT} and COUNT in seen
    finally:
        process.kill()
        process.communicate()
