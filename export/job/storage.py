"""How an export stores matrices and rows, by its recipe and the types that the checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

from stem_edge.config import ModelConfig
from stem_edge.export.job.recipe import BALANCED, KEEP, LOSSLESS, SMALL, Recipe
from stem_edge.export.job.table_plan import ExportRows, RowStorage
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
from stem_edge.tables.codecs import CODECS, RowType

# Type of a backbone -> size of its blocks. With 4 bits, blocks of 64 are as fast as 128; with 8 bits,
# what blocks of 32 save in errors of the activations is worth their scales.
BLOCK_SIZES: dict[WeightType, int] = {"int4": 64, "int8": 32, "fp32": 64}
TYPE_OF_BITS = {bits: name for name, bits in WEIGHT_BITS.items()}
# Names that mean a type of either engine -> the type.
WEIGHTS: dict[str, WeightType] = {SMALL: "int4", BALANCED: "int4", LOSSLESS: "int8", KEEP: "int4"}
MIXTURES: dict[str, GgufType] = {
    SMALL: "q4_0", BALANCED: "q4_k_m", LOSSLESS: "q8_0", KEEP: "q4_k_m",
}  # fmt: skip
# Divergence in nats that the 4-bit matrices of a type may cost.
# With 0.042, SmolLM2-135M-Instruct is no further off than with llama.cpp's Q4_K_M, in fewer bytes.
NATS = {SMALL: 0.1, BALANCED: 0.042, KEEP: 0.042}
# ggml's quantizers of these types ignore the importance of channels.
UNWEIGHTED: tuple[GgufType, ...] = ("f32", "f16", "q8_0")
CALIBRATION_TOKENS = 16384  # most that guide the quantizer
Format: TypeAlias = BackboneFormat | GgufFormat


@dataclass(frozen=True)
class Storage:
    """How a bundle is to be stored, and what its types are still chosen by."""

    format: Format
    rows: RowStorage
    nats: float | None = None  # that matrices of 4 bits may cost; None: the format says all types
    fixed: frozenset[MatrixKind] = frozenset(SMALL_KINDS)  # kinds that keep their type
    own_types: bool = False  # True if the format has the checkpoint's own types

    def judged(self, recipe: Recipe) -> bool:
        """Return True if the bundle is compared with its checkpoint; own types only if asked for."""
        asked = recipe.calibration is not None or recipe.max_kl is not None
        return not self.own_types or asked or bool(recipe.prefill_graph)

    def prefill(self, recipe: Recipe) -> bool:
        """Return True if int8 matrices for prompts are written; quality_check may drop them again."""
        if recipe.prefill_graph is not None:
            return recipe.prefill_graph
        return self.format.for_prompts and not self.own_types  # which are more exact


def storage_of(recipe: Recipe) -> Storage:
    """Return how a recipe stores a checkpoint that has no types of its own."""
    rows, named = row_storage(recipe.rows or "int8"), recipe.type or BALANCED
    if not isinstance(named, str):
        return Storage(named, rows)
    if recipe.engine == GgufFormat.engine:
        mixture = MIXTURES.get(named, cast(GgufType, named))
        return Storage(GgufFormat(weights=mixture, importance=mixture not in UNWEIGHTED), rows)
    weights = WEIGHTS.get(named, cast(WeightType, named))
    return Storage(plain_format(weights), rows, NATS.get(named))


def plain_format(weights: WeightType) -> BackboneFormat:
    """Return the format of a backbone for onnxruntime with one type of matrices."""
    return BackboneFormat(
        weights=weights,
        head=weights,
        block_size=BLOCK_SIZES[weights],
        asymmetric=weights == "int4",
        quantizer="gptq" if weights == "int4" else "rtn",
        kv_peaks=True,
    )


def kinds_of(model: ModelConfig) -> set[MatrixKind]:
    """Return the kinds of matrices that a model has."""
    shapes = model.backbone_shapes()
    found = {kind_of(name) for name, shape in shapes.items() if len(shape) == 2}
    if "qkv" in found:
        found.add("v")
    return found & set(MATRIX_KINDS) | set(VOCABULARY_KINDS)


def row_storage(kind: ExportRows | RowType) -> RowStorage:
    """Return the storage of rows of a type, in groups of the usual size."""
    return RowStorage(kind, 32 if kind != "mixed" and CODECS[kind].bits < 8 else 128)
