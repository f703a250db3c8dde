"""An export as its steps see it: the source, the options, and the folder to write; and its making."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.expected import kinds_of
from stem_edge.bundle.manifest import FileEntry
from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.job.recipe import choose_types, stored_once
from stem_edge.export.job.table_plan import TablePlan, plan_tables
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import BackboneFormat, GgufFormat, MatrixKind
from stem_edge.progress import Progress
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat
from stem_edge.tables.token_counts import Counts, count_tokens

if TYPE_CHECKING:
    from stem_edge.export.backbone.assistant import AssistantPart

Advance = Callable[[int], object]
Format = BackboneFormat | GgufFormat
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
    format: Format  # the options' format, with types that were measured
    text_ids: npt.NDArray[np.int64]  # of the calibration text
    counts: Counts  # of the tokens in a text that the user gave
    tables: TablePlan | None  # None for a dense model
    ggml: Ggml | None = None  # None unless the backbone is for ggml
    assistant: AssistantPart | None = None  # to be written

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
    text_ids: npt.NDArray[np.int64],
    ggml: Ggml | None,
) -> Job:
    """Plan the tables, and choose types by measuring unless the options say them."""
    given = text_ids if options.calibration is not None else text_ids[:0]
    counts = count_tokens(given, source.config.vocab_size)
    tables = options.stored_tables
    plan = plan_tables(source, *tables[:3], counts, tables.scales)
    layout = plan.format.tables if plan else None
    chosen = chosen_format(source, options, layout, text_ids)
    return Job(folder, source, converted, options, chosen, text_ids, counts, plan, ggml)


def chosen_format(
    source: Checkpoint,
    options: ExportOptions,
    layout: RecordLayout | None,
    text_ids: npt.NDArray[np.int64],
) -> Format:
    """Return the backbone's format, with types that are measured unless the options say them."""
    format, target = options.format, options.target
    if not isinstance(format, BackboneFormat):
        return format
    format = stored_once(source.config, format)
    if target is not None:
        layers = source.config.n_layers
        with Progress(layers, "choosing types", options.progress, layers=layers) as bar:
            format = choose_types(
                source, layout, format, options.fixed, target, text_ids, lambda: bar.advance(1)
            )
    return stored_once(source.config, format)


def check_kinds(source: Checkpoint, bits: Mapping[MatrixKind, int] | None) -> None:
    """Raise ExportError for kinds of matrices that the checkpoint does not have."""
    known = kinds_of(source.config)
    if absent := sorted((bits or {}).keys() - known):
        raise ExportError(
            f"{source.path}: has no matrix of the kind {absent[0]!r} named in bits; expected some of "
            f"{', '.join(sorted(known))}"
        )
