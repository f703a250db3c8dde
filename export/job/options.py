"""Options of an export: the keywords of export_bundle as one object, checked in one place."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast

import msgspec

from stem_edge.errors import ExportError
from stem_edge.export.job.recipe import BOUNDS, QUALITIES, Quality, Target
from stem_edge.export.job.table_plan import EXPORT_TABLES, FREQUENT, ExportTables
from stem_edge.graph.formats import (
    GGUF_TYPES,
    MATRIX_KINDS,
    SMALL_KINDS,
    VOCABULARY_KINDS,
    WEIGHT_BITS,
    BackboneFormat,
    EngineName,
    GgufFormat,
    GgufType,
    MatrixKind,
    OwnTypes,
    QuantizerName,
    WeightType,
    usual_type,
)
from stem_edge.tables.codecs import CODECS, RowType
from stem_edge.tables.rows import ScaleType
from stem_edge.units import parse_size

SIZES = (16, 32, 64, 128, 256)  # of blocks and groups
# Type of a backbone -> size of its blocks. With 4 bits, blocks of 64 are as fast as 128; with 8 bits,
# what blocks of 32 save in errors of the activations is worth their scales.
BLOCK_SIZES: dict[WeightType, int] = {"int4": 64, "int8": 32, "fp32": 64}
TYPES = {bits: name for name, bits in WEIGHT_BITS.items()}
# To choose from: 2 bits are only kept where a checkpoint has them.
CHOSEN: tuple[WeightType, ...] = ("fp32", "int8", "int4")
QUANTIZERS: tuple[QuantizerName, ...] = ("rtn", "gptq")
CALIBRATION_TOKENS = 16384
# ggml's quantizers of these types ignore the importance of channels.
UNWEIGHTED: tuple[GgufType, ...] = ("f32", "f16", "q8_0")
ExportEngine = Literal["onnx", "gguf"]
# Engine -> types that its backbone can have, and the default.
BACKBONES: dict[ExportEngine, tuple[Collection[str], WeightType | GgufType]] = {
    "onnx": (CHOSEN, "int4"),
    "gguf": (GGUF_TYPES, "q4_k_m"),
}
# Options that the engine gguf does not have: there a type leaves nothing else to choose.
ONNX_ONLY = (
    "quality", "size", "head", "bits", "block_size", "asymmetric", "quantizer", "prefill_graph",
)  # fmt: skip
USUAL: Quality = "balanced"
LOSSLESS: Quality = "near-lossless"
# Mean divergence in nats up to which a bundle is as good as its checkpoint, or at least the same model: with 0.05 to
# 0.13, SmolLM2-135M-Instruct has 84 to 92 % of the checkpoint's first choices, with 1.16, 44 %.
NEAR, FAR = 0.1, 0.5
# Share of what is left to max_kl that a second try aims for.
MARGIN = 0.7
File: TypeAlias = str | Path | None
Stored: TypeAlias = GgufType | OwnTypes | BackboneFormat | None


class StoredTables(NamedTuple):
    """Storage of the tables."""

    kind: ExportTables | RowType
    group_size: int
    frequent: float = FREQUENT  # share of the records that mixed tables keep at 8 bits
    scales: ScaleType = "fp32"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Keywords of export_bundle, which explains each; None: a default that depends on the others.

    Raises ExportError for values that do not exist or cannot be combined.
    """

    engine: ExportEngine | None = None
    quality: Quality | None = None
    size: int | str | None = None
    backbone: WeightType | GgufType | None = None
    tables: ExportTables | None = None
    lora: File = None
    assistant: File = None
    tokenizer: File = None
    ignore_keys: Collection[str] = ()
    head: WeightType | None = None
    bits: Mapping[MatrixKind, int] | None = None
    block_size: int | None = None
    asymmetric: bool | None = None
    quantizer: QuantizerName | None = None
    group_size: int | None = None
    prefill_graph: bool | None = None
    calibration: File = None
    calibration_tokens: int | None = None
    max_kl: float | None = None
    accept_far: bool = False
    frequent: float | None = None
    force: bool = False
    threads: int | None = None
    progress: bool | None = None
    # Types that a GGUF file came with, set by keep_stored_types.
    stored: Stored = None
    stored_rows: StoredTables | None = None  # of rows that are codes with scales, set likewise
    # Share of max_kl that is expected of the types, because estimates are low where little is
    # rounded (0.051 for 0.02 nats in SmolLM2-135M-Instruct).
    aim: float = 0.5

    def __post_init__(self) -> None:
        _ = self.format, self.stored_tables
        if self.size is not None:
            parse_size(self.size)
        for name in ("threads", "calibration_tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ExportError(f"{name} is {count}; expected at least 1")
        if self.max_kl is not None and not 0 <= self.max_kl < math.inf:
            raise ExportError(f"max_kl is {self.max_kl}; expected 0 nats or more, such as 0.1")

    @property
    def target(self) -> Target | None:
        """What types are chosen for, by measuring; None if they are all given."""
        if not isinstance(self.format, BackboneFormat) or self.backbone is not None:
            return None
        if self.stored is not None:
            return None
        if self.size is not None:
            return Target(nbytes=parse_size(self.size))
        if self.quality is None and self.max_kl is not None:
            return Target(nats=self.aim * self.max_kl)
        return None if self.quality == LOSSLESS else Target(nats=BOUNDS[self.quality or USUAL])

    @property
    def bound(self) -> float:
        """Mean divergence from the checkpoint, in nats, beyond which nothing is exported."""
        if self.max_kl is not None:
            return self.max_kl
        return math.inf if self.accept_far else FAR

    def closer(self, nats: float) -> ExportOptions | None:
        """Return options for types that come closer to the checkpoint than `nats`; None if none do.

        The third try for max_kl has 8 bits everywhere, as the second of usual types has.
        """
        if self.quality is not None or self.target is None:
            return None
        if self.size is not None or self.aim == 0:
            return None
        if self.max_kl is None:
            return replace(self, quality=LOSSLESS)
        first = self.aim == ExportOptions.aim
        return replace(self, aim=MARGIN * self.aim * self.max_kl / nats if first else 0.0)

    @property
    def fixed(self) -> frozenset[MatrixKind]:
        """Kinds of matrices with given types, or types that follow from others."""
        given: list[MatrixKind] = [*SMALL_KINDS, *(self.bits or {})]
        given += VOCABULARY_KINDS if self.head is not None else ()
        given += ["v"] if "qkv" in given else []
        return frozenset(given)

    @property
    def runs_on(self) -> EngineName:
        """Name of the engine in a bundle."""
        return self.format.engine

    @property
    def files(self) -> tuple[File, ...]:
        """Files to be read besides the checkpoint."""
        return self.lora, self.assistant, self.tokenizer, self.calibration

    @property
    def judged(self) -> bool:
        """True if the bundle is compared with its checkpoint; kept types are only if asked for."""
        asked = self.calibration is not None or self.max_kl is not None
        return self.stored is None or asked or bool(self.prefill_graph)

    @property
    def prefill(self) -> bool:
        """True if int8 matrices for prompts are written; quality_check may drop them again."""
        usual = isinstance(self.format, BackboneFormat) and self.format.weights != "fp32"
        usual = usual and self.stored is None  # kept types are more exact
        return usual if self.prefill_graph is None else self.prefill_graph

    @property
    def cpus(self) -> int:
        """Number of threads."""
        return self.threads or os.cpu_count() or 1

    @property
    def text_tokens(self) -> int:
        """Most tokens of the calibration text that guide the quantizer."""
        return self.calibration_tokens or CALIBRATION_TOKENS

    @cached_property
    def format(self) -> BackboneFormat | GgufFormat:
        """Storage of the backbone."""
        engines = {kind: engine for engine, (types, _) in BACKBONES.items() for kind in types}
        engine = self.engine or engines.get(self.backbone or "", "onnx")
        _check("engine", engine, BACKBONES)
        types, usual = BACKBONES[engine]
        if self.quality is not None:
            _check("quality", self.quality, QUALITIES)
            usual = "int8" if self.quality == LOSSLESS and engine == "onnx" else usual
        weights = self.backbone or usual
        if weights not in types:
            where = f"; {weights} needs the engine {engines[weights]}" if weights in engines else ""
            raise ExportError(
                f"backbone is {weights!r}; expected one of {', '.join(types)} with the engine "
                f"{engine}{where}"
            )
        if engine == "gguf":
            _refuse(
                self._given(*ONNX_ONLY),
                "for the engine onnx only: a type of the engine gguf leaves nothing else to choose; "
                "leave this out, or take --engine onnx",
            )
            if isinstance(self.stored, str | dict):
                return GgufFormat(weights=self.stored)
            return GgufFormat(weights=cast(GgufType, weights), importance=weights not in UNWEIGHTED)
        if isinstance(self.stored, BackboneFormat):
            return msgspec.structs.replace(self.stored, kv_peaks=self.judged)
        self._check_target()
        return self._quantized(self._plain(cast(WeightType, weights)))

    def given_types(self) -> BackboneFormat:
        """Return the types that are given, and 8 bits where they are measured: for an assistant."""
        return self._quantized(self._plain(cast(WeightType, self.backbone or "int8")))

    @cached_property
    def stored_tables(self) -> StoredTables:
        """How tables are stored."""
        if self.stored_rows is not None:
            return self.stored_rows
        kind, group_size, frequent = self.tables or "int8", self.group_size, self.frequent
        _check("tables", kind, EXPORT_TABLES)
        if group_size is None:
            group_size = 32 if kind != "mixed" and CODECS[kind].bits < 8 else 128
        _check("group_size", group_size, SIZES)
        if frequent is not None and (kind != "mixed" or not 0 < frequent < 1):
            raise ExportError(
                f"frequent is {frequent} with {kind} tables; expected more than 0 and less than 1, "
                "and mixed tables"
            )
        return StoredTables(kind, group_size, FREQUENT if frequent is None else frequent)

    def _plain(self, weights: WeightType) -> BackboneFormat:
        """Return the format without the choice of a quantizer."""
        head = self.head or weights
        block_size = BLOCK_SIZES[weights] if self.block_size is None else self.block_size
        _check("head", head, CHOSEN)
        _check("block_size", block_size, SIZES)
        given = self.bits or {}
        for kind, bits in given.items():
            _check("a kind of matrix in bits", kind, MATRIX_KINDS)
            _check(f"bits of {kind}", bits, [WEIGHT_BITS[name] for name in CHOSEN])
        usual = {kind: usual_type(kind, weights, head) for kind in MATRIX_KINDS}
        if "qkv" in given:
            usual["v"] = TYPES[given["qkv"]]
        kinds = {k: TYPES[bits] for k, bits in given.items() if TYPES[bits] != usual[k]}
        return BackboneFormat(
            weights=weights, head=head, block_size=block_size, kinds=kinds, kv_peaks=True
        )

    def _quantized(self, format: BackboneFormat) -> BackboneFormat:
        """Return the format with the choice of a quantizer."""
        if self.quantizer is not None:
            _check("quantizer", self.quantizer, QUANTIZERS)
        if not format.quantized:
            _refuse(
                self._given("quantizer", "asymmetric"),
                "for int4 and int8 matrices, and an fp32 backbone has none; leave this out, or take "
                "--backbone int4",
            )
            return format
        four = any(format.bits(kind) == 4 for kind in MATRIX_KINDS)
        asymmetric = four if self.asymmetric is None else self.asymmetric
        chosen = self.quantizer or ("gptq" if four else "rtn")
        return msgspec.structs.replace(format, asymmetric=asymmetric, quantizer=chosen)

    def _check_target(self) -> None:
        """Refuse more than one of what decides the types."""
        given = self._given("quality", "size", "backbone")
        if len(given) > 1:
            raise ExportError(
                f"{' and '.join(given)}: each chooses the types of all matrices; give one of them"
            )

    def _given(self, *names: str) -> list[str]:
        """Return the options that differ from their defaults."""
        return [name for name in names if getattr(self, name) != getattr(ExportOptions, name)]


def _refuse(given: list[str], why: str) -> None:
    if given:
        raise ExportError(f"{', '.join(given)}: {why}")


def _check(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise ExportError(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}")
