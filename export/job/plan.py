"""Plan of an export: the checkpoint to read, and the formats of the bundle to write."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.assistant import AssistantCheckpoint
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.recipe import BALANCED, KEEP, LOSSLESS, SMALL, Recipe
from stem_edge.export.job.table_plan import RowStorage, TablePlan
from stem_edge.export.quantization.calibration import sequences
from stem_edge.graph.formats import (
    MATRIX_KINDS,
    SMALL_KINDS,
    VOCABULARY_KINDS,
    WEIGHT_BITS,
    BackboneFormat,
    GgufFormat,
    GgufType,
    MatrixKind,
    WeightType,
)
from stem_edge.graph.layer import kind_of
from stem_edge.numerics.quantize import I64
from stem_edge.progress import Progress
from stem_edge.tables.rows import RecordLayout

# Type of a backbone -> values per block. With 4 bits, blocks of 64 are as fast as 128. With 8 bits,
# blocks of 32 need more scales, but reduce the errors of activations.
BLOCK_SIZES: dict[WeightType, int] = {"int4": 64, "int8": 32, "fp32": 64}
TYPE_OF_BITS = {bits: name for name, bits in WEIGHT_BITS.items()}
# Name that both engines know -> type of onnxruntime; type of ggml.
WEIGHTS: dict[str, WeightType] = {SMALL: "int4", BALANCED: "int4", LOSSLESS: "int8", KEEP: "int4"}
MIXTURES: dict[str, GgufType] = {
    SMALL: "q4_0", BALANCED: "q4_k_m", LOSSLESS: "q8_0", KEEP: "q4_k_m",
}  # fmt: skip
# Type -> largest divergence in nats that its 4-bit matrices may cause.
# With 0.033, SmolLM2-135M-Instruct diverges 4 % more than with llama.cpp's Q4_K_M, in 1 % fewer bytes (docs/results.md).
NATS = {SMALL: 0.1, BALANCED: 0.033, KEEP: 0.033}
# ggml's quantizers of these types ignore the importance of channels.
UNWEIGHTED: tuple[GgufType, ...] = ("f32", "f16", "q8_0")
# Most tokens to guide the quantizer: of a user's text, and of the shipped text for small and large models.
OWN_TOKENS, SHIPPED_TOKENS, LARGE_MODEL_TOKENS = 16384, 8192, 4096
LARGE = 500_000_000  # parameters of a backbone
Format: TypeAlias = BackboneFormat | GgufFormat


@dataclass(frozen=True)
class Plan:
    """Plan of one export: checkpoint, options and formats. plan_of makes it; later steps change copies."""

    source: Checkpoint
    recipe: Recipe
    format: Format  # of the backbone
    rows: RowStorage
    nats: float | None = None  # largest divergence by 4-bit matrices; None: format has all types
    fixed: frozenset[MatrixKind] = frozenset(SMALL_KINDS)  # kinds that keep their type
    own_types: bool = False  # True if the format has the checkpoint's own types
    tables: TablePlan | None = None  # None for a dense model
    assistant: AssistantCheckpoint | None = None  # to be written
    # Token ids of the calibration text; empty if it is not needed.
    text_ids: I64 = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)

    @property
    def judged(self) -> bool:
        """True if logits are compared with the checkpoint's: types change, or options need it."""
        asked = self.recipe.calibration is not None or self.recipe.max_kl is not None
        return not self.own_types or asked or bool(self.recipe.prefill_graph)

    @property
    def prefill(self) -> bool:
        """True if int8 matrices for prompts are written; quality_check may delete them later."""
        if self.recipe.prefill_graph is not None:
            return self.recipe.prefill_graph
        # Worth a second copy of the matrices, unless they are exact or the checkpoint's own types.
        return self.format.packed and self.format.weights != "fp32" and not self.own_types

    @property
    def guides(self) -> list[list[int]]:
        """Sequences of token ids from the calibration text, for GPTQ or importance vectors."""
        config, tokens = self.source.config, OWN_TOKENS
        if self.recipe.calibration is None:
            large = config.backbone_parameters >= LARGE
            tokens = LARGE_MODEL_TOKENS if large else SHIPPED_TOKENS
        return sequences(self.text_ids, tokens, config.max_context)

    @property
    def counts(self) -> I64:
        """Number of uses of each token [V] in the user's calibration text; all 0 without a text."""
        given = self.text_ids if self.recipe.calibration is not None else self.text_ids[:0]
        return np.bincount(given, minlength=self.source.config.vocab_size)

    @property
    def layout(self) -> RecordLayout | None:
        """Layout of a table record in a slot of the row cache; None for a dense model."""
        return self.tables.format.tables if self.tables else None


def plan_of(source: Checkpoint, recipe: Recipe) -> Plan:
    """Return a plan for a checkpoint, with types from the recipe; later steps may change types."""
    kind, named = recipe.rows or "int8", recipe.type or BALANCED
    rows = RowStorage(kind, 32 if kind == "int4" else 128)
    if not isinstance(named, str):
        return Plan(source, recipe, named, rows)
    if recipe.engine == GgufFormat.engine:
        mixture = MIXTURES.get(named, cast(GgufType, named))
        format = GgufFormat(weights=mixture, importance=mixture not in UNWEIGHTED)
        return Plan(source, recipe, format, rows)
    weights = WEIGHTS.get(named, cast(WeightType, named))
    return Plan(source, recipe, plain_format(weights), rows, NATS.get(named))


def plain_format(weights: WeightType) -> BackboneFormat:
    """Return a backbone format for onnxruntime that stores all matrices in one type."""
    return BackboneFormat(
        weights=weights,
        head=weights,
        block_size=BLOCK_SIZES[weights],
        asymmetric=weights == "int4",
        quantizer="gptq" if weights == "int4" else "rtn",
        kv_peaks=True,
    )


def kinds_of(model: ModelConfig) -> set[MatrixKind]:
    """Return the kinds of weight matrices in a model, such as "qkv" or "down"."""
    shapes = model.backbone_shapes()
    found = {kind_of(name) for name, shape in shapes.items() if len(shape) == 2}
    if "qkv" in found:
        found.add("v")
    return found & set(MATRIX_KINDS) | set(VOCABULARY_KINDS)


def begin_layers(bar: Progress, what: str, config: ModelConfig) -> None:
    """Start a progress bar labelled `what`; its total is the layers' weights, as float32 bytes."""
    shapes = config.backbone_shapes().items()
    values = sum(math.prod(shape) for name, shape in shapes if name.startswith("layers."))
    bar.begin(what, 4 * values, layers=config.n_layers)
