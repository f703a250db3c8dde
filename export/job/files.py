"""Writing the files of a bundle: hashed on the way, on the medium when they are closed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from stem_edge.bundle.manifest import FileEntry, KindError
from stem_edge.export.quantization.error_meter import ErrorMeter, errors
from stem_edge.files import disk
from stem_edge.files.trees import make_folders
from stem_edge.progress import Progress

BUFFER_NBYTES = 1 << 20


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Put the path into an OSError of the block, which knows only a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class BundleFile:
    """File being written, and the size and checksum of what was written."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._gathered, self._digest = bytearray(), hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; small pieces are gathered."""
        view = memoryview(data)
        self._digest.update(view)
        self.nbytes += view.nbytes
        if len(self._gathered) + view.nbytes > BUFFER_NBYTES:
            self.flush()
        if view.nbytes > BUFFER_NBYTES:
            self._write(view)
        else:
            self._gathered += view

    def align(self, boundary: int) -> int:
        """Pad with zeros to a multiple of `boundary` bytes; return the position."""
        self.write(bytes(-self.nbytes % boundary))
        return self.nbytes

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of what was written."""
        return FileEntry(self.nbytes, self._digest.hexdigest())

    def flush(self) -> None:
        """Write what was gathered."""
        self._write(memoryview(self._gathered))
        self._gathered = bytearray()

    def _write(self, data: memoryview) -> None:
        with named_errors(self._path):
            disk.write_all(self._descriptor, data)


@contextlib.contextmanager
def create_file(path: Path) -> Iterator[BundleFile]:
    """Create a file, and its folder; it is on the medium when the block ends without an error."""
    make_folders(path.parent)
    descriptor = disk.create(path)
    try:
        yield (file := BundleFile(path, descriptor))
        file.flush()
        with named_errors(path):
            disk.fsync(descriptor)
    finally:
        disk.close(descriptor)


class Output:
    """Files of a new bundle in `folder`, and what quantization loses in each part of it."""

    def __init__(self, folder: Path, bar: Progress) -> None:
        self.folder, self.bar = folder, bar
        self.files: dict[str, FileEntry] = {}
        self._meters: dict[str, ErrorMeter] = {}

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BundleFile]:
        """Open a file to be written."""
        with create_file(self.folder / name) as file:
            yield file
        self.files[name] = file.entry

    def write(self, name: str, data: bytes) -> None:
        """Write one whole file."""
        with self.file(name) as file:
            file.write(data)

    def meter(self, part: str) -> ErrorMeter:
        """Return the meter of a part's quantization errors."""
        return self._meters.setdefault(part, ErrorMeter())

    def errors(self) -> dict[str, KindError]:
        """Return the quantization errors so far, by kind of tensor."""
        return errors(self._meters.values())

    def remove(self, part: str, name: str) -> None:
        """Delete the file of a part, and forget its errors."""
        del self._meters[part], self.files[name]
        disk.remove(self.folder / name)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write one whole file."""
    with create_file(path) as file:
        file.write(data)
    return file.entry
