"""The finished steps of an export: their files, and what quantization cost in them."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.manifest import FileEntry, KindError
from stem_edge.export.job.job import Advance, WriteStep
from stem_edge.export.quantization.error_meter import ErrorMeter, errors
from stem_edge.files import disk


class Steps:
    """Steps of the export that writes `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, FileEntry]] = {}
        self._meters: dict[str, ErrorMeter] = {}

    def run(self, name: str, write: WriteStep, progress: Advance) -> None:
        """Run a step, which writes whole files."""
        meter = ErrorMeter()
        written = write(meter, progress).items()
        self._files[name] = {p.relative_to(self._folder).as_posix(): e for p, e in written}
        self._meters[name] = meter

    def files(self) -> dict[str, FileEntry]:
        """Return the entries of all files so far, by their path in the bundle."""
        return {name: entry for files in self._files.values() for name, entry in files.items()}

    def errors(self) -> dict[str, KindError]:
        """Return the errors of quantization so far, by kind of tensor."""
        return errors(meter.totals() for meter in self._meters.values())

    def forget(self, name: str) -> None:
        """Delete the files of a step, and leave its errors out."""
        del self._meters[name]
        for path in self._files.pop(name):
            disk.remove(self._folder / path)
