"""Files leave the page cache when they are dropped."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from stem_edge.system.page_cache import drop_pages

SIZE = 8 << 20


def cached_pages(path: Path) -> int:
    """Count the pages of a file that are in memory."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
        held = ctypes.c_char.from_buffer(mapped)
        assert not ctypes.CDLL(None).mincore(ctypes.byref(held), ctypes.c_size_t(SIZE), pages)
        del held  # the mapping cannot be closed while something refers to it
        return sum(page & 1 for page in pages)


@pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="this system drops no pages when asked"
)
def test_a_file_that_was_just_written_can_be_dropped() -> None:
    # Beside this file, because temporary files may lie in memory.
    with tempfile.NamedTemporaryFile(dir=Path(__file__).parent, prefix=".pages-") as file:
        path = Path(file.name)
        path.write_bytes(os.urandom(SIZE))
        assert cached_pages(path) == SIZE // mmap.PAGESIZE
        drop_pages([path])  # including pages that were not on disk yet
        if cached_pages(path) == SIZE // mmap.PAGESIZE:
            pytest.skip("the file system of the checkout keeps all pages")
        assert cached_pages(path) <= 0.01 * SIZE // mmap.PAGESIZE
