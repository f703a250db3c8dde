"""Share of files in the page cache, after dropping and reading them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stem_edge.system.page_cache import cached_nbytes, drop_pages, make_cold

SIZE = 8 << 20
pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="this system drops no pages when asked"
)


def written(path: Path, nbytes: int = SIZE) -> Path:
    path.write_bytes(os.urandom(nbytes))
    return path


def forgets(folder: Path) -> bool:
    path = written(folder / "probe", 1 << 20)
    drop_pages([path])
    cached = cached_nbytes([path])
    path.unlink()
    return not cached


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that can drop pages, as tmpfs cannot."""
    if forgets(tmp_path):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".pages-") as name:
        if not forgets(Path(name)):
            pytest.skip("the file systems of temporary files and of the checkout keep all pages")
        yield Path(name)


def test_a_file_that_was_just_written_is_cached_and_can_be_dropped(folder: Path) -> None:
    path = written(folder / "a")
    assert cached_nbytes([path]) == SIZE
    drop_pages([path])  # including pages that were not on disk yet
    cached = cached_nbytes([path])
    assert cached is not None and cached <= 0.01 * SIZE


def test_files_that_stay_in_memory_are_a_warning(folder: Path) -> None:
    path = written(folder / "a")
    make_cold([path])
    assert (cached_nbytes([path]) or 0) <= 0.01 * SIZE
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:]) == SIZE
        with pytest.warns(RuntimeWarning, match="stays in the page cache, so this run is not cold"):
            make_cold([path])


def test_half_of_a_file_is_cached_when_it_was_read(folder: Path) -> None:
    path = written(folder / "a")
    drop_pages([path])
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        assert len(file.read(SIZE // 2)) == SIZE // 2
    cached = cached_nbytes([path])
    assert cached is not None and SIZE // 2 <= cached < SIZE
    assert cached_nbytes([path]) == cached  # because asking must not read anything
