"""How an export stores matrices and rows, as its options name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

from stem_edge.export.job.options import BALANCED, LOSSLESS, SMALL, ExportOptions
from stem_edge.export.job.table_plan import ExportRows
from stem_edge.graph.formats import (
    SMALL_KINDS,
    WEIGHT_BITS,
    BackboneFormat,
    GgufFormat,
    GgufType,
    MatrixKind,
    OwnTypes,
    WeightType,
)
from stem_edge.tables.codecs import CODECS, RowType
from stem_edge.tables.rows import ScaleType

# Type of a backbone -> size of its blocks. With 4 bits, blocks of 64 are as fast as 128; with 8 bits,
# what blocks of 32 save in errors of the activations is worth their scales.
BLOCK_SIZES: dict[WeightType, int] = {"int4": 64, "int8": 32, "fp32": 64}
TYPE_OF_BITS = {bits: name for name, bits in WEIGHT_BITS.items()}
# Divergence in nats that the 4-bit matrices of a type may cost.
# With 0.042, SmolLM2-135M-Instruct is no further off than with llama.cpp's Q4_K_M, in fewer bytes.
NATS = {SMALL: 0.1, BALANCED: 0.042}
# Names of types on ggml that are none of llama.cpp's.
MIXTURES: dict[str, GgufType] = {SMALL: "q4_0", BALANCED: "q4_k_m", LOSSLESS: "q8_0"}
# ggml's quantizers of these types ignore the importance of channels.
UNWEIGHTED: tuple[GgufType, ...] = ("f32", "f16", "q8_0")
CALIBRATION_TOKENS = 16384  # most that guide the quantizer
Format: TypeAlias = BackboneFormat | GgufFormat
StoredTypes: TypeAlias = GgufType | OwnTypes | BackboneFormat | None


class RowStorage(NamedTuple):
    """Storage of the rows."""

    kind: ExportRows | RowType
    group_size: int  # values that share a scale
    scales: ScaleType = "fp32"


@dataclass(frozen=True)
class Storage:
    """How a bundle is to be stored, and what its types are still chosen by."""

    format: Format
    rows: RowStorage
    nats: float | None = None  # that matrices of 4 bits may cost; None: the format says all types
    fixed: frozenset[MatrixKind] = frozenset(SMALL_KINDS)  # kinds that keep their type
    own_types: bool = False  # True if the format has the checkpoint's own types

    def judged(self, options: ExportOptions) -> bool:
        """Return True if the bundle is compared with its checkpoint; own types only if asked for."""
        asked = options.calibration is not None or options.max_kl is not None
        return not self.own_types or asked or bool(options.prefill_graph)

    def prefill(self, options: ExportOptions) -> bool:
        """Return True if int8 matrices for prompts are written; quality_check may drop them again."""
        if options.prefill_graph is not None:
            return options.prefill_graph
        format = self.format
        quantized = isinstance(format, BackboneFormat) and format.weights != "fp32"
        return quantized and not self.own_types  # which are more exact


def storage_of(options: ExportOptions) -> Storage:
    """Return how the options store a checkpoint that has no types of its own."""
    rows = row_storage(options.rows or "int8")
    named = options.type
    if isinstance(named, BackboneFormat):
        return Storage(named, rows)
    return STORAGE[options.engine](named or BALANCED, rows)


def _of_ggml(named: str, rows: RowStorage) -> Storage:
    weights = MIXTURES.get(named, named)
    mixture = cast(GgufType, MIXTURES[BALANCED] if weights == "keep" else weights)
    return Storage(GgufFormat(weights=mixture, importance=mixture not in UNWEIGHTED), rows)


def _of_onnxruntime(named: str, rows: RowStorage) -> Storage:
    if named in TYPE_OF_BITS.values():
        return Storage(plain_format(cast(WeightType, named)), rows)
    if named == LOSSLESS:
        return Storage(plain_format("int8"), rows)
    return Storage(plain_format("int4"), rows, NATS.get(named, NATS[BALANCED]))


STORAGE = {BackboneFormat.engine: _of_onnxruntime, GgufFormat.engine: _of_ggml}


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


def row_storage(kind: ExportRows | RowType) -> RowStorage:
    """Return the storage of rows of a type, in groups of the usual size."""
    return RowStorage(kind, 32 if kind != "mixed" and CODECS[kind].bits < 8 else 128)
