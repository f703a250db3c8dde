"""An export as its steps see it: the source, the options, and the folder to write; and its making."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.manifest import FileEntry
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.job.recipe import choose_types, stored_once
from stem_edge.export.job.storage import Format, Storage
from stem_edge.export.job.table_plan import TablePlan, plan_tables
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import BackboneFormat
from stem_edge.progress import Progress
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat
from stem_edge.tables.token_counts import Counts, count_tokens

if TYPE_CHECKING:
    from stem_edge.export.backbone.assistant import AssistantPart

Advance = Callable[[int], object]
# A step: writes some whole files and returns their entries; gives what quantization costs to the
# meter, and source bytes read, counted as float32, to the progress bar.
WriteStep = Callable[[ErrorMeter, Advance], dict[Path, FileEntry]]


@dataclass(frozen=True)
class Job:
    """Everything that the steps of one export need."""

    folder: Path
    source: Checkpoint
    converted: ExportedTokenizer
    options: ExportOptions
    storage: Storage
    format: Format  # the storage's format, with types that were measured
    text_ids: npt.NDArray[np.int64]  # of the calibration text
    counts: Counts  # of the tokens in a text that the user gave
    tables: TablePlan | None  # None for a dense model
    ggml: Ggml | None = None  # None unless the backbone is for ggml
    assistant: AssistantPart | None = None  # to be written

    @property
    def judged(self) -> bool:
        """True if the bundle is compared with its checkpoint."""
        return self.storage.judged(self.options)

    @property
    def prefill(self) -> bool:
        """True if int8 matrices for prompts are written."""
        return self.storage.prefill(self.options)

    @property
    def table_format(self) -> TableFormat | None:
        """Format of the tables; None for a dense model."""
        return self.tables.format if self.tables else None

    @property
    def layout(self) -> RecordLayout | None:
        """Layout of rows in their slots; None for a dense model."""
        return self.tables.format.tables if self.tables else None


def layers_nbytes(config: ModelConfig) -> int:
    """Return the bytes of all layers' tensors in the backbone, as float32."""
    shapes = config.backbone_shapes().items()
    return 4 * sum(math.prod(shape) for name, shape in shapes if name.startswith("layers."))


def begin_layers(bar: Progress, what: str, config: ModelConfig) -> None:
    """Begin to show a walk through the tensors of all layers."""
    bar.begin(what, layers_nbytes(config), layers=config.n_layers)


def make_job(
    folder: Path,
    source: Checkpoint,
    converted: ExportedTokenizer,
    options: ExportOptions,
    storage: Storage,
    text_ids: npt.NDArray[np.int64],
    ggml: Ggml | None,
) -> Job:
    """Plan the tables, and choose types by measuring unless the storage says them."""
    given = text_ids if options.calibration is not None else text_ids[:0]
    counts = count_tokens(given, source.config.vocab_size)
    rows = storage.rows
    plan = plan_tables(source, rows.kind, rows.group_size, counts, rows.scales)
    chosen = chosen_format(source, storage, text_ids, options.progress)
    return Job(folder, source, converted, options, storage, chosen, text_ids, counts, plan, ggml)


def chosen_format(
    source: Checkpoint,
    storage: Storage,
    text_ids: npt.NDArray[np.int64],
    progress: bool | None = None,
) -> Format:
    """Return the backbone's format, with types that are measured unless the storage says them."""
    format = storage.format
    if not isinstance(format, BackboneFormat):
        return format
    format = stored_once(source.config, format)
    if storage.nats is not None:
        layers = source.config.n_layers
        with Progress(layers, "choosing types", progress, layers=layers) as bar:
            format = choose_types(
                source, format, storage.fixed, storage.nats, text_ids, lambda: bar.advance(1)
            )
    return stored_once(source.config, format)
