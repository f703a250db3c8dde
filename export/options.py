"""The options of one export, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import msgspec

from stem_edge.errors import ExportError
from stem_edge.export.table_plan import EXPORT_TABLES, FREQUENT, ExportTables
from stem_edge.formats import (
    GGUF_TYPES,
    MATRIX_KINDS,
    VOCABULARY_KINDS,
    WEIGHT_BITS,
    BackboneFormat,
    EngineName,
    GgufFormat,
    GgufType,
    MatrixKind,
    QuantizerName,
    WeightType,
)

SIZES = (16, 32, 64, 128, 256)  # of blocks and groups
BLOCK_SIZE = 128
TYPES = {bits: name for name, bits in WEIGHT_BITS.items()}
QUANTIZERS: tuple[QuantizerName, ...] = get_args(QuantizerName)
CALIBRATION_TOKENS = 16384
# ggml has no use for the importance of channels in these.
UNWEIGHTED: tuple[GgufType, ...] = ("f32", "f16", "q8_0")
ExportEngine = Literal["onnx", "gguf"]
# Engine -> the types that its backbone can have, and which it has by default.
BACKBONES: dict[ExportEngine, tuple[Collection[str], WeightType | GgufType]] = {
    "onnx": (WEIGHT_BITS, "int4"),
    "gguf": (GGUF_TYPES, "q4_k_m"),
}


@dataclass(frozen=True)
class TableOptions:
    """How the tables are stored."""

    kind: ExportTables
    group_size: int
    frequent: float  # share of the records that mixed tables keep at 8 bits


@dataclass(frozen=True)
class ExportOptions:
    """What is to be written, and with how many threads."""

    backbone: BackboneFormat | GgufFormat
    tables: TableOptions | None  # None: those of the bundle that the backbone is added to
    calibration_tokens: int  # of the text, at most, that the backbone is quantized with
    prefill: bool
    prefill_asked: bool  # so that it stays even if it is less exact than the other graphs
    threads: int
    max_kl: float | None  # nats; it decides whether there will be a bundle, not what is in it

    @property
    def engine(self) -> EngineName:
        """Which runs the backbone."""
        return "ggml" if isinstance(self.backbone, GgufFormat) else "onnxruntime"

    def described(self) -> str:
        """All that changes the bytes of the bundle."""
        backbone = (self.backbone, self.calibration_tokens)
        return repr((backbone, self.tables, self.prefill, self.prefill_asked))


@dataclass(frozen=True)
class BackboneOptions:
    """What is asked of the backbone; None where a default depends on other options."""

    engine: ExportEngine = "onnx"
    weights: WeightType | GgufType | None = None
    head: WeightType | None = None
    bits: Mapping[MatrixKind, int] = field(default_factory=dict)
    block_size: int | None = None
    asymmetric: bool = False
    quantizer: QuantizerName | None = None
    prefill_graph: bool | None = None

    def format(self, *, calibrated: bool) -> BackboneFormat | GgufFormat:
        """How the backbone will be stored. Raises ExportError for values that do not exist."""
        _check("engine", self.engine, BACKBONES)
        types, usual = BACKBONES[self.engine]
        weights = self.weights or usual
        if weights not in types:
            others = {t: e for e, (known, _) in BACKBONES.items() for t in known}
            where = f"; {weights} is of the engine {others[weights]}" if weights in others else ""
            expected = ", ".join(types)
            raise ExportError(
                f"backbone is {weights!r}; expected one of {expected} with the engine {self.engine}"
                f"{where}"
            )
        if self.engine == "gguf":
            self._refuse_options_of_onnx()
            weighted = calibrated and weights not in UNWEIGHTED
            return GgufFormat(weights=cast(GgufType, weights), importance=weighted)
        return self._onnx(cast(WeightType, weights), calibrated)

    def _refuse_options_of_onnx(self) -> None:
        given = {
            "head": self.head is not None,
            "bits": bool(self.bits),
            "block_size": self.block_size is not None,
            "asymmetric": self.asymmetric,
            "quantizer": self.quantizer is not None,
            "prefill_graph": self.prefill_graph is not None,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ExportError(
                f"{', '.join(names)}: for the engine onnx, and this is gguf, whose types say all "
                "that there is to choose; leave it out, or take --engine onnx"
            )

    def _onnx(self, weights: WeightType, calibrated: bool) -> BackboneFormat:
        head = self.head or weights
        block_size = BLOCK_SIZE if self.block_size is None else self.block_size
        _check("head", head, WEIGHT_BITS)
        _check("block_size", block_size, SIZES)
        for kind, bits in self.bits.items():
            _check("a kind of matrix in bits", kind, MATRIX_KINDS)
            _check(f"bits of {kind}", bits, TYPES)
        if self.quantizer is not None:
            _check("quantizer", self.quantizer, QUANTIZERS)
        if self.quantizer == "gptq" and not calibrated:
            raise ExportError(
                "quantizer 'gptq' needs to see what matrices are multiplied with; give a text of "
                "the kind that the model will see: --calibration FILE, or take --quantizer search"
            )
        usual = {k: head if k in VOCABULARY_KINDS else weights for k in MATRIX_KINDS}
        kinds = {k: TYPES[bits] for k, bits in self.bits.items() if TYPES[bits] != usual[k]}
        format = BackboneFormat(weights=weights, head=head, block_size=block_size, kinds=kinds)
        if not format.quantized:
            if self.quantizer is not None or self.asymmetric:
                raise ExportError(
                    "quantizer and asymmetric are for int4 and int8, and no matrix of an fp32 "
                    "backbone is; leave them out, or take --backbone int4"
                )
            return format
        return msgspec.structs.replace(
            format,
            asymmetric=self.asymmetric,
            quantizer=self.quantizer or ("gptq" if calibrated else "search"),
        )


def make_options(
    backbone: BackboneOptions,
    *,
    tables: ExportTables | None,
    group_size: int | None,
    frequent: float | None,
    add: bool,
    calibrated: bool,
    calibration_tokens: int | None,
    threads: int | None,
    max_kl: float | None,
) -> ExportOptions:
    """Fill in defaults; raises ExportError for values that do not exist.

    add: whether the tables are those of a bundle; calibrated: whether there is a calibration text.
    """
    format = backbone.format(calibrated=calibrated)
    described = _tables(tables, group_size, frequent, add=add)
    if calibration_tokens is not None and not calibrated:
        raise ExportError(
            "calibration_tokens counts tokens of a calibration text, and there is none; give one with "
            "--calibration FILE"
        )
    if calibration_tokens is None:
        calibration_tokens = CALIBRATION_TOKENS
    for name, count in (("threads", threads), ("calibration_tokens", calibration_tokens)):
        if count is not None and count < 1:
            raise ExportError(f"{name} is {count}; expected at least 1")
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise ExportError(f"max_kl is {max_kl}; expected 0 nats or more, 0.1 for example")
    usual = isinstance(format, BackboneFormat) and format.weights != "fp32"
    return ExportOptions(
        backbone=format,
        tables=described,
        calibration_tokens=calibration_tokens,
        prefill=usual if backbone.prefill_graph is None else backbone.prefill_graph,
        prefill_asked=backbone.prefill_graph is True,
        threads=threads or os.cpu_count() or 1,
        max_kl=max_kl,
    )


def _tables(
    kind: ExportTables | None, group_size: int | None, frequent: float | None, *, add: bool
) -> TableOptions | None:
    if add:
        given = {"tables": kind, "group_size": group_size, "frequent": frequent}
        if names := [name for name, value in given.items() if value is not None]:
            raise ExportError(
                f"{', '.join(names)}: with add, the bundle's tables stay as they are; leave it out, "
                "or export a new bundle, without --add"
            )
        return None
    kind = kind or "int8"
    _check("tables", kind, EXPORT_TABLES)
    if group_size is None:
        group_size = 32 if kind == "int4" else 128
    _check("group_size", group_size, SIZES)
    if frequent is not None and (kind != "mixed" or not 0 < frequent < 1):
        raise ExportError(
            f"frequent is {frequent} with {kind} tables; expected more than 0 and less than 1, "
            "with mixed tables"
        )
    return TableOptions(kind, group_size, FREQUENT if frequent is None else frequent)


def _check(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        *most, last = map(str, choices)
        among = (
            f"one of {', '.join([*most, last])}"
            if isinstance(value, str)
            else (f"{', '.join(most)} or {last}")
        )
        raise ExportError(f"{name} is {value!r}; expected {among}")
