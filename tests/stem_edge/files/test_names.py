"""Names of files that come from elsewhere, and which folders are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from stem_edge.files.names import check_names
from stem_edge.files.trees import remove_tree


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a/b"], "'a' is the name of a file and of a folder"),
        (["a/b", "A/c"], "file names 'A' and 'a' are the same file on some systems"),
        (["README", "readme"], "are the same file on some systems"),
    ],
)
def test_names_that_could_be_one_file(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_names(names)
    check_names(["a/b", "a/c", "d"])


def test_what_is_no_folder_directly_in_another_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a" / "b", tmp_path / "file", tmp_path / "link", tmp_path / "none"):
        with pytest.raises(OSError, match="delete it yourself"):
            remove_tree(path, tmp_path)
    assert (tmp_path / "a" / "b").is_dir()
