"""What an unfinished export has done already, so that the next one goes on from there.

An export is a row of steps, each of some whole files. The journal is a file of the working folder,
a line a finished step: its files with their checksums and what it measured. A step that is not in
it never happened: its files are written again. The first line says what is being exported; if the
checkpoint or an option differs, everything starts anew. So a resumed export ends in the same bytes.

A step's files are durable, names included, before its line is written. Lines of an earlier run may
be readable and yet not on the medium, so its journal is written anew, as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stem_edge.bundle.manifest import FileEntry
from stem_edge.export.job.files import Leftover
from stem_edge.export.job.job import Advance, Work
from stem_edge.export.quantization.error_meter import ErrorMeter, Total
from stem_edge.files import disk
from stem_edge.files.whole_file import write_whole

NAME = "export.journal"
MAX_NBYTES = 1 << 26


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
        self._report()
        self._remove_unfinished()
        lines = [msgspec.json.encode(step) + b"\n" for step in self.steps.values()]
        write_whole(self._path, header + b"".join(lines), durable=True)

    @property
    def progress(self) -> int:
        """Source bytes of all finished steps."""
        return sum(step.progress for step in self.steps.values())

    def run(self, name: str, work: Work, progress: Advance) -> None:
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
        self._sync_names(files)
        self._append(msgspec.json.encode(step) + b"\n")
        self.steps[name] = step

    def files(self) -> dict[str, FileEntry]:
        """All files of all steps."""
        return {name: e for step in self.steps.values() for name, e in step.files.items()}

    def forget(self, name: str) -> None:
        """Take a step back: its files go, and its line no longer counts."""
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
            disk.write_all(descriptor, line)
            disk.fsync(descriptor)
        except OSError as error:
            error.filename = str(self._path)
            raise
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
                step = msgspec.json.decode(line, type=Step)
            except (msgspec.DecodeError, msgspec.ValidationError):
                return  # the line that the kill cut; nothing can come after it
            if not all(self._is_whole(name, entry) for name, entry in step.files.items()):
                continue  # it was taken back; the steps after it stand by themselves
            self.steps[step.name] = step

    def _is_whole(self, name: str, entry: FileEntry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry.nbytes

    def _report(self) -> None:
        if self.steps:
            found = f"steps that an interrupted export finished are used again: {len(self.steps)}"
        elif any(self.folder.iterdir()):
            found = "what an interrupted export left is of another one, or of no use: it is deleted"
        else:
            return
        warnings.warn(Leftover(f"{self.folder}: {found}"), stacklevel=2)

    def _remove_unfinished(self) -> None:
        """All that is of no finished step."""
        known = {self.folder / name for name in self.files()}
        needed = known | {parent for path in known for parent in path.parents}
        _remove_others(self.folder, needed)


def _remove_others(folder: Path, needed: set[Path]) -> None:
    """Everything below but files and folders that are needed; a link goes, not what it leads to."""
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        if path in needed and is_folder:
            _remove_others(path, needed)
        elif path not in needed:
            (disk.remove_tree if is_folder else disk.remove)(path)
