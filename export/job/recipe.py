"""Recipe of an export: one object that holds and checks the options of export_bundle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stem_edge.errors import ExportError
from stem_edge.export.job.table_plan import EXPORT_ROWS, ExportRows
from stem_edge.graph.formats import ENGINES, GGUF_TYPES, BackboneFormat, EngineName, GgufFormat
from stem_edge.system.memory import check_threads, usable_cpus

# Names of types that both engines have, by how close the bundle comes to its checkpoint.
SMALL, BALANCED, LOSSLESS, KEEP = "small", "balanced", "near-lossless", "keep"
# Engine -> types that users can choose. "int2" is missing: bundles have it only from checkpoints.
TYPES: dict[EngineName, tuple[str, ...]] = {
    BackboneFormat.engine: (SMALL, BALANCED, LOSSLESS, KEEP, "int4", "int8", "fp32"),
    GgufFormat.engine: (SMALL, BALANCED, LOSSLESS, KEEP, *GGUF_TYPES),
}
EXACT = {BackboneFormat.engine: "fp32", GgufFormat.engine: "f32"}  # types without rounding
BETTER = {
    BackboneFormat.engine: "--type near-lossless or fp32, --rows int8",
    GgufFormat.engine: "--type q6_k or near-lossless, --rows int8, --calibration FILE",
}
LACKS = {BackboneFormat.engine: (), GgufFormat.engine: ("assistant", "prefill_graph")}
# Mean divergence in nats: at most NEAR is as good as the checkpoint; above FAR is another model.
# At 0.05 to 0.13, 84 to 92 % of the checkpoint's first choices remain (SmolLM2-135M-Instruct); at 1.16, 44 %.
NEAR, FAR = 0.1, 0.5
File: TypeAlias = str | Path | None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of an export, explained at export_bundle. None: use the default for the checkpoint.

    Raises ExportError for values that do not exist or cannot be combined.
    """

    engine: EngineName = "onnxruntime"
    type: str | BackboneFormat | None = None  # BackboneFormat: type of each matrix, for tests
    rows: ExportRows | None = None
    lora: File = None
    assistant: File = None
    tokenizer: File = None
    calibration: File = None
    max_kl: float | None = None
    prefill_graph: bool | None = None
    force: bool = False
    threads: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        _check("engine", self.engine, ENGINES)
        if isinstance(self.type, str):
            others = (e for e, types in TYPES.items() if e != self.engine and self.type in types)
            where = "".join(f"; {self.type} needs --engine {engine}" for engine in others)
            _check("type", self.type, TYPES[self.engine], f" with the engine {self.engine}{where}")
        if self.rows is not None:
            _check("rows", self.rows, EXPORT_ROWS)
        check_threads(self.threads, ExportError)
        if self.max_kl is not None and not self.max_kl >= 0:
            raise ExportError(f"max_kl is {self.max_kl}; expected 0 nats or more, such as 0.1")
        for name in LACKS[self.engine]:
            if getattr(self, name) is not None:
                raise ExportError(
                    f"{name}: for the engine onnxruntime only; leave this out, or take "
                    "--engine onnxruntime"
                )

    @property
    def cpus(self) -> int:
        return self.threads or usable_cpus()

    @property
    def bound(self) -> float:
        """Largest mean divergence from the checkpoint, in nats, that a bundle may have."""
        return FAR if self.max_kl is None else self.max_kl


def _check(name: str, value: object, choices: Collection[str], where: str = "") -> None:
    if value not in choices:
        raise ExportError(f"{name} is {value!r}; expected one of {', '.join(choices)}{where}")
