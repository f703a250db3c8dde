"""Which pages of mapped files stay in this process."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from stem_edge.runtime.backends.onnxruntime.prepared.mapped_pages import give_back_mapped
from stem_edge.system.memory import PROC


def resident(file: Path) -> int:
    """Pages of a mapped file in this process, in kB."""
    text = (PROC / "self" / "smaps").read_text()
    return int(text.split(str(file), 1)[1].split("Rss:", 1)[1].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_mapped_pages_are_given_back_unless_they_were_written_to(tmp_path: Path) -> None:
    files = [tmp_path / "read", tmp_path / "written", tmp_path / "half", tmp_path / "other"]
    maps = list[mmap.mmap]()
    for file in files:
        file.write_bytes(bytes([7]) * (1 << 20))
        with file.open("rb") as opened:
            maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    maps[1][5] = 9
    values = [np.frombuffer(one, np.uint8) for one in maps]
    sums = [7 << 20, (7 << 20) + 2, 7 << 20, 7 << 20]
    assert [int(one.sum()) for one in values] == sums
    give_back_mapped(dict(zip(files, [1 << 20, 1 << 20, 1 << 19, 0], strict=True)))
    assert [resident(file) for file in files] == [0, 1024, 512, 1024]
    assert [int(one.sum()) for one in values] == sums
