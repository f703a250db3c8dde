"""Shards of a table store as work for other processes, which see the same disk.

The process that runs the export hands out names of shards, and only it writes the journal. A worker
writes a shard below PARTS and then gives it its name. So a worker may be killed, or be taken for
dead and still go on: another one writes the same bytes under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from stem_edge import __version__
from stem_edge.bundle.manifest import TABLES, FileEntry
from stem_edge.errors import CheckpointError, ExportError
from stem_edge.export.checkpoints.lora import merge_lora
from stem_edge.export.checkpoints.readers import open_checkpoint
from stem_edge.export.checkpoints.sources import changed
from stem_edge.export.job.job import Advance
from stem_edge.export.job.journal import Journal, JournalStep, read_subject, run_step
from stem_edge.export.job.table_plan import TablePlan
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tables import TableWriter
from stem_edge.files import disk
from stem_edge.files.trees import make_folders, remove_tree
from stem_edge.numerics.matrix import Matrix
from stem_edge.progress import Progress

PARTS = "parts"  # folder of the working folder
SHARED = "every machine must see it under the same path: put it on a shared disk"


@dataclass(frozen=True)
class ShardTask:
    """Shards to be written for an export that another process runs; it can be pickled."""

    names: Sequence[str]
    subject: str  # of the journal in the folder
    folder: Path  # where the export writes
    checkpoint: Path
    lora: Path | None
    ignore_keys: Collection[str]  # of config.json
    files: Mapping[Path, tuple[int, ...]]  # of checkpoint and adapter, as Sources.used returns them
    plan: TablePlan
    shard_nbytes: int
    version: str = __version__

    def nbytes(self, threads: int) -> int:
        """Return the memory that writing a shard takes, beside what the process has."""
        return self._writer(self.folder, {}, threads).nbytes

    def open(self) -> Mapping[int, Matrix]:
        """Open the tables of the checkpoint for `write`.

        Raises CheckpointError and ExportError if this process does not see the files of the one
        that runs the export.
        """
        if self.version != __version__:
            raise ExportError(
                f"stem-edge {__version__} is installed here, and {self.version} where the export "
                "runs; install one version on every machine"
            )
        if read_subject(self.folder) != self.subject:
            raise ExportError(
                f"{self.folder}: not seen here with the files of the export that runs; {SHARED}"
            )
        if (file := changed(self.files)) is not None:
            raise CheckpointError(
                f"{file}: missing here, or another than where the export runs; {SHARED}"
            )
        source = open_checkpoint(self.checkpoint, self.ignore_keys)
        if self.lora is not None:
            source = merge_lora(source, self.lora)
        return source.tables

    def write(self, name: str, tables: Mapping[int, Matrix], threads: int = 1) -> JournalStep:
        """Write a shard. tables: as `open` returned them. Raises CheckpointError, OSError."""
        root = self.folder / PARTS / uuid4().hex
        work = dict(self._writer(root, tables, threads).shards())[name]

        def write(meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
            written = work(meter, advance).items()
            return {self._place(path.relative_to(root), path): entry for path, entry in written}

        step = run_step(self.folder, name, write, lambda nbytes: None)
        remove_tree(root, root.parent)
        return step

    def _writer(self, root: Path, tables: Mapping[int, Matrix], threads: int) -> TableWriter:
        return TableWriter(root, self.plan, tables, threads, self.shard_nbytes)

    def _place(self, name: Path, written: Path) -> Path:
        path = self.folder / TABLES / name
        make_folders(path.parent)
        disk.rename(written, path)
        return path


# Has shards written by other processes; yields the steps in any order, as they are done.
Elsewhere: TypeAlias = Callable[[ShardTask], Generator[JournalStep]]


def write_elsewhere(
    elsewhere: Elsewhere, shards: ShardTask, journal: Journal, bar: Progress
) -> None:
    """Have shards written by other processes, and record each as it is done."""
    if not shards.names:  # an earlier run had all of them written
        return
    with closing(elsewhere(shards)) as done:
        for step in done:
            journal.record(step)
            bar.advance(step.progress)
    if (parts := shards.folder / PARTS).is_dir():  # of processes that were killed
        remove_tree(parts, shards.folder)
