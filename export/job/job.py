"""An export as the parts that write its bundle see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.measured_types import choose_types
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.job.storage import Format, Storage
from stem_edge.export.job.table_plan import TablePlan, plan_tables
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.graph.decode import decoding, prompts
from stem_edge.graph.formats import BackboneFormat, GgufFormat
from stem_edge.progress import Progress
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat
from stem_edge.tables.token_counts import Counts, count_tokens

if TYPE_CHECKING:
    from stem_edge.export.backbone.assistant import AssistantPart


@dataclass(frozen=True)
class Job:
    """What an export reads, and how it stores that."""

    source: Checkpoint
    tokenizer: ExportedTokenizer
    recipe: Recipe
    storage: Storage  # its format says all types
    text_ids: npt.NDArray[np.int64]  # of the calibration text
    counts: Counts  # of the tokens in a text that the user gave
    tables: TablePlan | None  # None for a dense model
    assistant: AssistantPart | None  # to be written
    judged: bool  # whether the bundle is compared with its checkpoint
    prefill: bool  # whether int8 matrices for prompts are written

    @property
    def format(self) -> Format:
        """Format of the backbone."""
        return self.storage.format

    @property
    def table_format(self) -> TableFormat | None:
        """Format of the tables; None for a dense model."""
        return self.tables.format if self.tables else None

    @property
    def layout(self) -> RecordLayout | None:
        """Layout of rows in their slots; None for a dense model."""
        return self.tables.format.tables if self.tables else None


def make_job(
    source: Checkpoint,
    tokenizer: ExportedTokenizer,
    recipe: Recipe,
    storage: Storage,
    text_ids: npt.NDArray[np.int64],
    assistant: AssistantPart | None = None,
) -> Job:
    """Plan the tables, and choose types by measuring unless the storage says them."""
    given = text_ids if recipe.calibration is not None else text_ids[:0]
    counts = count_tokens(given, source.config.vocab_size)
    plan = plan_tables(source, storage.rows, counts)
    chosen = choose_types(source, storage, text_ids, recipe.progress)
    judged, prefill = chosen.judged(recipe), chosen.prefill(recipe)
    return Job(
        source, tokenizer, recipe, chosen, text_ids, counts, plan, assistant, judged, prefill
    )


def flash_nbytes(job: Job) -> int:
    """Return the bytes of the bundle's weights and tables. Raises GraphError."""
    model, format, tables = job.source.config, job.format, job.table_format
    if job.prefill:
        format = msgspec.structs.replace(format, prefill=True)
    nbytes = tables.nbytes(model.prompt_rows) if tables else 0
    return nbytes + weights_nbytes(format, model, job.layout)


@singledispatch
def weights_nbytes(format: Format, model: ModelConfig, layout: RecordLayout | None) -> int:
    """Return the bytes of a backbone's weights, of prompts too. Raises GraphError."""
    raise TypeError(f"{type(format).__name__} is no format of a backbone")


@weights_nbytes.register
def _(format: GgufFormat, model: ModelConfig, layout: RecordLayout | None) -> int:
    from stem_edge.ggml import gguf_schema  # for such bundles alone

    return sum(gguf_schema.backbone_nbytes(model, format.weights).values())


@weights_nbytes.register
def _(format: BackboneFormat, model: ModelConfig, layout: RecordLayout | None) -> int:
    nbytes = decoding(model, layout, format).plan.nbytes
    return nbytes + (prompts(model, layout, format).plan.nbytes if format.prefill else 0)


def layers_nbytes(config: ModelConfig) -> int:
    """Return the bytes of all layers' tensors in the backbone, as float32."""
    shapes = config.backbone_shapes().items()
    return 4 * sum(math.prod(shape) for name, shape in shapes if name.startswith("layers."))


def begin_layers(bar: Progress, what: str, config: ModelConfig) -> None:
    """Begin to show a walk through the tensors of all layers."""
    bar.begin(what, layers_nbytes(config), layers=config.n_layers)
