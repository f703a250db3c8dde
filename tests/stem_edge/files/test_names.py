"""Which folders are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from stem_edge.files.trees import remove_tree


def test_what_is_no_folder_directly_in_another_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a" / "b", tmp_path / "file", tmp_path / "link", tmp_path / "none"):
        with pytest.raises(OSError, match="delete it yourself"):
            remove_tree(path, tmp_path)
    assert (tmp_path / "a" / "b").is_dir()
