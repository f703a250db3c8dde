"""An export as its steps see it: the source, the options, and the folder to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import gguf_footprint
from stem_edge.bundle.manifest import FileEntry
from stem_edge.bundle.opening import Bundle
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.job.table_plan import TablePlan
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import BackboneFormat, GgufFormat
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.token_counts import Counts

Advance = Callable[[int], object]
Tell = Callable[[str], object]
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
    format: BackboneFormat | GgufFormat  # that of the options, with types that were measured
    text_ids: npt.NDArray[np.int64]  # of the calibration text
    counts: Counts  # of the tokens in a text that the user gave
    tables: TablePlan | None  # None for a dense model
    base: Bundle | None = None  # the bundle that a backbone is added to
    ggml: Ggml | None = None  # None unless the backbone is for ggml

    @property
    def layout(self) -> RecordLayout | None:
        """Layout of rows in their slots; None for a dense model."""
        return self.tables.format.tables if self.tables else None

    @property
    def nbytes(self) -> int:
        """Bytes to be written, without the tokenizer and descriptions."""
        config, format = self.source.config, self.format
        tables = self.tables.format if self.tables else None
        if isinstance(format, GgufFormat):
            found = gguf_footprint(config, format, tables)
        else:
            format = msgspec.structs.replace(format, prefill=self.options.prefill)
            found = expected_footprint(config, format, tables)
        # Tables of the base are hard links, so they need no room.
        kept = found.tables_nbytes if self.base is not None else 0
        return found.flash_nbytes - kept

    @property
    def total(self) -> int:
        """Source bytes to be read, as float32; the prefill graph reads the layers once more."""
        config = self.source.config
        parameters = config.backbone_parameters
        if self.base is None:
            parameters += config.table_parameters
        if self.options.prefill:
            shapes = config.backbone_shapes().items()
            layers = [s for name, s in shapes if name.startswith("layers.") and len(s) == 2]
            parameters += sum(rows * width for rows, width in layers)
        return 4 * parameters
