"""Journal of the finished steps of an export, so that it can go on after it was killed.

An export is a sequence of steps, each of which writes whole files. The journal is a file of the
working folder with one line for each finished step: its files with their checksums, and the errors
that it measured. Files of a step that is not in the journal are written again. The first line
identifies what is exported; if the checkpoint or an option differs, everything starts again.
So a resumed export ends in the same bytes.

A step's files are durable, names included, before its line is written. Lines of an earlier run may
be readable and yet not on the medium, so the whole journal is written again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stem_edge.bundle.manifest import FileEntry
from stem_edge.export.job.files import named_errors
from stem_edge.export.job.job import Advance, WriteStep
from stem_edge.export.job.publish import Leftover
from stem_edge.export.quantization.error_meter import ErrorMeter, Total
from stem_edge.files import disk
from stem_edge.files.trees import remove_tree
from stem_edge.files.whole_file import write_whole

NAME = "export.journal"
MAX_NBYTES = 1 << 26


class Header(msgspec.Struct):
    """First line of the journal."""

    subject: str  # digest of all that changes the bundle's bytes


class JournalStep(msgspec.Struct, kw_only=True):
    """Line of the journal: a finished step."""

    name: str
    files: dict[str, FileEntry]  # path in the bundle -> entry
    totals: dict[str, Total]
    progress: int  # source bytes that it read, counted as float32


def run_step(folder: Path, name: str, write: WriteStep, progress: Advance) -> JournalStep:
    """Run a step that writes into `folder`."""
    meter, seen = ErrorMeter(), [0]

    def advance(nbytes: int) -> None:
        seen.append(nbytes)  # not added up here, because `+=` of several threads loses some
        progress(nbytes)

    files = write(meter, advance)
    entries = {path.relative_to(folder).as_posix(): entry for path, entry in files.items()}
    return JournalStep(name=name, files=entries, totals=meter.totals(), progress=sum(seen))


class Journal:
    """Steps of the export in `folder`, also from an earlier run."""

    def __init__(self, folder: Path, subject: str) -> None:
        self.folder, self.subject, self.steps = folder, subject, dict[str, JournalStep]()
        self._path = folder / NAME
        header = msgspec.json.encode(Header(subject)) + b"\n"
        self._read(header)
        self._report()
        self._remove_unfinished()
        lines = [msgspec.json.encode(step) + b"\n" for step in self.steps.values()]
        write_whole(self._path, header + b"".join(lines), durable=True)

    @property
    def progress(self) -> int:
        """Source bytes of all finished steps."""
        return sum(step.progress for step in self.steps.values())

    def run(self, name: str, write: WriteStep, progress: Advance) -> None:
        """Run a step and record it, unless an earlier run has finished it."""
        if name in self.steps:
            progress(self.steps[name].progress)
            return
        step = run_step(self.folder, name, write, progress)
        self._sync_names(self.folder / name for name in step.files)
        self._append(msgspec.json.encode(step) + b"\n")
        self.steps[step.name] = step

    def files(self) -> dict[str, FileEntry]:
        """Path in the bundle -> entry, for the files of all finished steps."""
        return {name: e for step in self.steps.values() for name, e in step.files.items()}

    def forget(self, name: str) -> None:
        """Delete a step's files; its line then no longer counts, because they are missing."""
        for path in self.steps.pop(name).files:
            disk.remove(self.folder / path)

    def close(self) -> None:
        """Remove the journal: the folder is complete."""
        disk.remove(self._path)

    def _sync_names(self, files: Iterable[Path]) -> None:
        below = {folder for path in files for folder in path.relative_to(self.folder).parents}
        for folder in sorted(below):
            disk.sync_folder(self.folder / folder)

    def _append(self, line: bytes) -> None:
        descriptor = disk.append(self._path)
        try:
            with named_errors(self._path):
                disk.write_all(descriptor, line)
                disk.fsync(descriptor)
        finally:
            disk.close(descriptor)

    def _read(self, header: bytes) -> None:
        try:
            lines = disk.read_file(self._path, MAX_NBYTES).splitlines(keepends=True)
        except OSError:
            return
        if not lines or lines[0] != header:
            return
        for line in lines[1:]:
            try:
                step = msgspec.json.decode(line, type=JournalStep)
            except (msgspec.DecodeError, msgspec.ValidationError):
                return  # cut by a kill, so it must be the last line
            if not all(self._is_whole(name, entry) for name, entry in step.files.items()):
                continue  # forgotten; steps after it are kept, since none depends on another
            self.steps[step.name] = step

    def _is_whole(self, name: str, entry: FileEntry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry.nbytes

    def _report(self) -> None:
        if self.steps:
            found = f"finished steps of an interrupted export are used again: {len(self.steps)}"
        elif any(self.folder.iterdir()):
            found = "files of an interrupted export do not fit this one; they are deleted"
        else:
            return
        warnings.warn(Leftover(f"{self.folder}: {found}"), stacklevel=2)

    def _remove_unfinished(self) -> None:
        """Delete everything that belongs to no finished step."""
        known = {self.folder / name for name in self.files()}
        needed = known | {parent for path in known for parent in path.parents}
        _remove_others(self.folder, needed)


def _remove_others(folder: Path, needed: set[Path]) -> None:
    """Delete unneeded files of a folder; a link is deleted, not its target."""
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        if path in needed and is_folder:
            _remove_others(path, needed)
        elif path not in needed and is_folder:
            remove_tree(path, folder)
        elif path not in needed:
            disk.remove(path)
