"""The options of one export, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_args

from stem_edge.bundle import (
    MATRIX_KINDS,
    VOCABULARY_KINDS,
    WEIGHT_BITS,
    BackboneFormat,
    MatrixKind,
    QuantizerName,
    WeightType,
)
from stem_edge.errors import ExportError
from stem_edge.export.table_plan import EXPORT_TABLES, FREQUENT, ExportTables

SIZES = (16, 32, 64, 128, 256)  # of blocks and groups
TYPES = {bits: name for name, bits in WEIGHT_BITS.items()}
QUANTIZERS: tuple[QuantizerName, ...] = get_args(QuantizerName)
CALIBRATION_TOKENS = 16384


@dataclass(frozen=True)
class ExportOptions:
    """What is to be written, and with how many threads."""

    backbone: BackboneFormat
    tables: ExportTables
    group_size: int
    frequent: float  # share of the records that mixed tables keep at 8 bits
    calibration_tokens: int  # of the text, at most, that the backbone is quantized with
    prefill: bool
    prefill_asked: bool  # so that it stays even if it is less exact than the other graphs
    threads: int
    max_kl: float | None  # nats; it decides whether there will be a bundle, not what is in it

    def described(self) -> str:
        """All that changes the bytes of the bundle."""
        tables = (self.tables, self.group_size, self.frequent)
        backbone = (self.backbone, self.calibration_tokens)
        return repr((backbone, tables, self.prefill, self.prefill_asked))


@dataclass(frozen=True)
class BackboneOptions:
    """What is asked of the backbone; None where a default depends on other options."""

    weights: WeightType = "int4"
    head: WeightType | None = None
    bits: Mapping[MatrixKind, int] = field(default_factory=dict)
    block_size: int = 128
    asymmetric: bool = False
    quantizer: QuantizerName | None = None

    def format(self, *, calibrated: bool) -> BackboneFormat:
        """How the backbone will be stored. Raises ExportError for values that do not exist."""
        head = self.head or self.weights
        _check("backbone", self.weights, WEIGHT_BITS)
        _check("head", head, WEIGHT_BITS)
        _check("block_size", self.block_size, SIZES)
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
        usual = {k: head if k in VOCABULARY_KINDS else self.weights for k in MATRIX_KINDS}
        kinds = {k: TYPES[bits] for k, bits in self.bits.items() if TYPES[bits] != usual[k]}
        format = BackboneFormat(
            weights=self.weights, head=head, block_size=self.block_size, kinds=kinds
        )
        if not format.quantized:
            if self.quantizer is not None or self.asymmetric:
                raise ExportError(
                    "quantizer and asymmetric are for int4 and int8, and no matrix of an fp32 "
                    "backbone is; leave them out, or take --backbone int4"
                )
            return format
        return BackboneFormat(
            weights=self.weights,
            head=head,
            block_size=self.block_size,
            kinds=kinds,
            asymmetric=self.asymmetric,
            quantizer=self.quantizer or ("gptq" if calibrated else "search"),
        )


def make_options(
    backbone: BackboneOptions,
    *,
    tables: ExportTables,
    group_size: int | None,
    frequent: float | None,
    calibrated: bool,
    calibration_tokens: int | None,
    prefill_graph: bool | None,
    threads: int | None,
    max_kl: float | None,
) -> ExportOptions:
    """Fill in defaults; raises ExportError for values that do not exist.

    calibrated: whether there is a calibration text.
    """
    format = backbone.format(calibrated=calibrated)
    _check("tables", tables, EXPORT_TABLES)
    if group_size is None:
        group_size = 32 if tables == "int4" else 128
    _check("group_size", group_size, SIZES)
    if frequent is not None and (tables != "mixed" or not 0 < frequent < 1):
        raise ExportError(
            f"frequent is {frequent} with {tables} tables; expected more than 0 and less than 1, "
            "with mixed tables"
        )
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
    return ExportOptions(
        backbone=format,
        tables=tables,
        group_size=group_size,
        frequent=FREQUENT if frequent is None else frequent,
        calibration_tokens=calibration_tokens,
        prefill=backbone.weights != "fp32" if prefill_graph is None else prefill_graph,
        prefill_asked=prefill_graph is True,
        threads=threads or os.cpu_count() or 1,
        max_kl=max_kl,
    )


def _check(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        *most, last = map(str, choices)
        among = (
            f"one of {', '.join([*most, last])}"
            if isinstance(value, str)
            else (f"{', '.join(most)} or {last}")
        )
        raise ExportError(f"{name} is {value!r}; expected {among}")
