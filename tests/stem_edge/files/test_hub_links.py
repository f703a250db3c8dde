"""Links in a hub's cache: two forms are followed, and nothing that only looks like them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.plain_files import check_file, check_folders

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATA, SHARED = b"weights", "ab" + "0" * 62


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of a cache, with a blob, one that it shares, and files beside it."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "snapshots" / COMMIT / "sub").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository.parent / "blobs" / "ab").mkdir(parents=True)
    for place in (
        repository / "blobs" / "blob",
        repository.parent / "blobs" / "ab" / SHARED,
        repository.parent / "secret",
        tmp_path / "secret",
    ):
        place.write_bytes(DATA)
    return repository


def linked(repository: Path, name: str, target: str) -> Path:
    """Make a link in the snapshot."""
    path = repository / "snapshots" / COMMIT / name
    path.symlink_to(target)
    return path


def shared(repository: Path, target: str) -> Path:
    """Make a blob that is a link, and a link to it in the snapshot."""
    (repository / "blobs" / "etag").symlink_to(target)
    return linked(repository, "file", "../../blobs/etag")


def through_folder(repository: Path, name: str, target: str) -> Path:
    """Make a folder of the cache a link to one elsewhere."""
    elsewhere = repository.parents[1] / "elsewhere"
    (repository / name).rename(elsewhere)
    (repository / name).symlink_to(elsewhere)
    return linked(repository, "file", target)


@pytest.mark.parametrize(
    "make",
    [
        lambda repository: linked(repository, "file", "../../blobs/blob"),
        lambda repository: linked(repository, "sub/file", "../../../blobs/blob"),
        lambda repository: shared(repository, f"../../blobs/ab/{SHARED}"),
    ],
)
def test_links_of_the_cache_are_followed(
    repository: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = make(repository)
    assert disk.read_file(link, 100) == DATA
    check_file(link, len(DATA))
    with pytest.raises(BundleError, match="7 bytes found, 8 expected"):
        check_file(link, 8)
    monkeypatch.chdir(link.parent)
    assert disk.read_file(Path(link.name), 100) == DATA
    (own := tmp_path / "own").symlink_to(link.parent)  # of the user, around the bundle
    assert disk.read_file(own / link.name, 100) == DATA


@pytest.mark.parametrize(
    "make",
    [
        lambda r: linked(r, "file", "/etc/passwd"),
        lambda r: linked(r, "file", str(r / "blobs" / "blob")),
        lambda r: linked(r, "file", "../../../secret"),
        lambda r: linked(r, "file", "../../../../secret"),
        lambda r: linked(r, "file", "../../blobs/../../secret"),
        lambda r: linked(r, "file", "../../blobs/sub/blob"),
        lambda r: linked(r, "file", "../../../blobs/ab"),
        lambda r: linked(r, "file", f"../../../blobs/ab/{SHARED}"),
        lambda r: linked(r, "file", "../.././blobs/blob"),
        lambda r: linked(r, "file", "../../blobs/.."),
        lambda r: linked(r, "sub/file", "../../blobs/blob"),
        lambda r: linked(r, "sub/file", "../../../../models--org--name/blobs/blob"),
        lambda r: linked(r, "file", "blobs/blob"),
        lambda r: linked(r, "file", "../" * 99 + "blobs/blob"),
        lambda r: linked(r, "file", "sub"),
        lambda r: shared(r, "blob"),
        lambda r: shared(r, "../../secret"),
        lambda r: shared(r, "/etc/passwd"),
        lambda r: shared(r, "../../blobs/ab/" + "cd" + "0" * 62),
        lambda r: shared(r, f"../../blobs/../blobs/ab/{SHARED}"),
        lambda r: through_folder(r, "blobs", "../../blobs/blob"),
    ],
)
def test_other_links_are_refused(repository: Path, make: Callable[[Path], Path]) -> None:
    link = make(repository)
    with pytest.raises(disk.NotRegularError):
        disk.read_file(link, 100)
    with pytest.raises(BundleError, match="it is a link"):
        check_file(link, len(DATA))


def test_a_repository_without_blobs(repository: Path) -> None:
    (repository / "blobs" / "blob").unlink()
    (repository / "blobs").rmdir()
    with pytest.raises(disk.NotRegularError):
        disk.read_file(linked(repository, "file", "../../blobs/blob"), 100)


@pytest.mark.parametrize("place", ["elsewhere/{}", "snapshots/main", "Snapshots/{}"])
def test_links_elsewhere_are_refused(repository: Path, place: str) -> None:
    folder = repository / place.format(COMMIT)
    folder.mkdir(parents=True)
    (link := folder / "file").symlink_to("../../blobs/blob")
    with pytest.raises(disk.NotRegularError):
        disk.read_file(link, 100)


def test_a_folder_that_is_a_link_is_refused(repository: Path) -> None:
    root = repository / "snapshots" / COMMIT
    (root / "tables").symlink_to("sub")
    with pytest.raises(BundleError, match="not a folder"):
        check_folders(root, root / "tables" / "file", set())


def test_a_blob_that_is_gone_is_missing(repository: Path) -> None:
    link = linked(repository, "file", "../../blobs/blob")
    (repository / "blobs" / "blob").unlink()
    with pytest.raises(FileNotFoundError):
        disk.read_file(link, 100)
    with pytest.raises(BundleError, match="cannot read"):
        check_file(link, len(DATA))
