"""What an unfinished export has done already, so that the next one goes on from there.

An export is a row of steps, each of some whole files. The journal is a file of the working folder,
a line a finished step: its files with their checksums and what it measured. A step that is not in
it never happened: its files are written again. The first line says what is being exported; if the
checkpoint or an option differs, everything starts anew. So a resumed export ends in the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import stem_edge
from stem_edge.bundle import FileEntry
from stem_edge.export.files import LOCK
from stem_edge.export.report import ErrorMeter, Total

NAME = "export.journal"


class Step(msgspec.Struct, kw_only=True):
    """One finished step."""

    name: str
    files: dict[str, FileEntry]  # path in the bundle -> entry
    totals: dict[str, Total]
    progress: int  # source bytes that it went through


class Journal:
    """Steps of the export in `folder`, those of an earlier run included."""

    def __init__(self, folder: Path, subject: str) -> None:
        self.folder, self.steps = folder, dict[str, Step]()
        self._path = folder / NAME
        header = msgspec.json.encode({"subject": subject}) + b"\n"
        self._read(header)
        if not self.steps:
            _remove_all(folder)
            self._path.write_bytes(header)
        self._remove_unfinished()

    @property
    def progress(self) -> int:
        """Source bytes of all finished steps."""
        return sum(step.progress for step in self.steps.values())

    def run(
        self,
        name: str,
        work: Callable[[ErrorMeter, Callable[[int], object]], dict[Path, FileEntry]],
        progress: Callable[[int], object],
    ) -> None:
        """Do a step unless it is done: work(meter, progress) writes and returns its files."""
        if name in self.steps:
            return
        meter, seen = ErrorMeter(), [0]

        def advance(nbytes: int) -> None:
            seen.append(nbytes)  # threads append; they would lose an addition
            progress(nbytes)

        files = work(meter, advance)
        entries = {p.relative_to(self.folder).as_posix(): entry for p, entry in files.items()}
        step = Step(name=name, files=entries, totals=meter.totals(), progress=sum(seen))
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(step) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.steps[name] = step

    def files(self) -> dict[str, FileEntry]:
        """All files of all steps."""
        return {name: e for step in self.steps.values() for name, e in step.files.items()}

    def forget(self, name: str) -> None:
        """Take a step back: its files go, and its line no longer counts."""
        for path in self.steps.pop(name).files:
            (self.folder / path).unlink()

    def close(self) -> None:
        """Remove the journal: the folder is complete."""
        self._path.unlink()

    def _read(self, header: bytes) -> None:
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except OSError:
            return
        if not lines or lines[0] != header:
            return
        for line in lines[1:]:
            try:
                step = msgspec.json.decode(line, type=Step)
            except (msgspec.DecodeError, msgspec.ValidationError):
                return  # the line that the kill cut; nothing can come after it
            if not all(self._is_whole(name, entry) for name, entry in step.files.items()):
                continue  # it was taken back; the steps after it stand by themselves
            self.steps[step.name] = step

    def _is_whole(self, name: str, entry: FileEntry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry.nbytes

    def _remove_unfinished(self) -> None:
        known = {self.folder / name for name in [*self.files(), NAME, LOCK]}
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in known:
                path.unlink()


def subject(options: object, sources: Sequence[Path], written: Sequence[Path]) -> str:
    """A digest of what is exported and how: files are told by name, size and time of change.

    What the export itself writes does not count, even inside of a source.
    """
    own = {path.resolve() for path in written}
    inside = {path.resolve() for source in sources for path in (source, *source.rglob("*"))}
    files = sorted(path for path in inside if path.is_file() and not own & {path, *path.parents})
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    described = repr((stem_edge.__version__, options, stats))
    return hashlib.sha256(described.encode()).hexdigest()


def _remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
