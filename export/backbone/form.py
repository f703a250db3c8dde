"""What differs between the forms of a backbone while it is exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.manifest import FileEntry
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.job import Job, WriteStep
from stem_edge.export.job.storage import Format, StoredTypes
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import F32
from stem_edge.progress import Progress
from stem_edge.tables.store import TableFormat

Written: TypeAlias = Callable[[], Mapping[str, FileEntry]]  # the files of earlier steps


class Form(ABC):
    """A form of backbone, as exports write it."""

    exact: str  # options that quantize nothing
    better: str  # options that come closer to the checkpoint
    after_tables = False  # whether its steps run after the steps of the tables

    def library(self) -> Ggml | None:
        """Return the library that quantizes, if one does. Raises BackendError if it is missing."""
        return None

    @abstractmethod
    def check(self, source: Checkpoint) -> None:
        """Raise ExportError for a model that it cannot hold."""

    @abstractmethod
    def footprint(
        self, model: ModelConfig, format: Format, tables: TableFormat | None, *, prefill: bool
    ) -> Footprint:
        """Return the sizes of a bundle, with or without a graph for prompts. Raises GraphError."""

    @abstractmethod
    def stored(self, config: ModelConfig, types: dict[str, TensorType]) -> StoredTypes:
        """Return what keeps these types of a GGUF file, by the names of their matrices."""

    def texts_of_peaks(self, job: Job) -> Sequence[list[int]]:
        """Return the sequences that give peaks of keys and values, beside the judged one."""
        return ()

    @abstractmethod
    def steps(
        self, job: Job, peaks: dict[str, F32], written: Written, bar: Progress
    ) -> list[tuple[str, WriteStep]]:
        """Return the name and function of each step.

        peaks: input -> greatest magnitude of each of its channels [K], as calibration.observe returns.
        """
