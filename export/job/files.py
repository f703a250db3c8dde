"""Writes the files of a bundle: hashes their data, and fsyncs them before they are closed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from stem_edge.bundle.manifest import FileEntry
from stem_edge.files import disk
from stem_edge.files.trees import make_folders
from stem_edge.progress import Progress


class BundleFile:
    """File that is being written, with the size and checksum of its data so far."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._digest = descriptor, hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._digest.update(view)
        self.nbytes += view.nbytes
        disk.write_all(self._descriptor, view)

    def align(self, boundary: int) -> None:
        """Pad the file with zeros to a multiple of `boundary` bytes."""
        self.write(bytes(-self.nbytes % boundary))

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.nbytes, self._digest.hexdigest())


@contextlib.contextmanager
def create_file(path: Path) -> Iterator[BundleFile]:
    """Create a file and its folder; at the end of the `with` block, the file is fsynced."""
    make_folders(path.parent)
    descriptor = disk.create(path)
    try:
        yield BundleFile(descriptor)
        disk.fsync(descriptor)
    finally:
        disk.close(descriptor)


class Output:
    """Writes a bundle's files into `folder`; records their sizes and checksums."""

    def __init__(self, folder: Path, bar: Progress) -> None:
        self.folder, self.bar = folder, bar
        self.files: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BundleFile]:
        """Open a file of the bundle for writing; its size and hash are recorded at the end."""
        with create_file(self.folder / name) as file:
            yield file
        self.files[name] = file.entry

    def write(self, name: str, data: bytes) -> None:
        with self.file(name) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        del self.files[name]
        disk.remove(self.folder / name)


def write_file(path: Path, data: bytes) -> None:
    with create_file(path) as file:
        file.write(data)
