"""The options of one export, checked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from stem_edge.bundle import WEIGHT_BITS, BackboneFormat, WeightType
from stem_edge.errors import ExportError
from stem_edge.rows import ROW_BITS, RowType


@dataclass(frozen=True)
class ExportOptions:
    """What is to be written, and with how many threads."""

    backbone: BackboneFormat
    tables: RowType
    group_size: int
    prefill: bool
    prefill_asked: bool  # so that it stays even if it is less exact than the other graphs
    threads: int
    max_kl: float | None  # nats; it decides whether there will be a bundle, not what is in it

    def described(self) -> str:
        """All that changes the bytes of the bundle."""
        return repr((self.backbone, self.tables, self.group_size, self.prefill, self.prefill_asked))


def make_options(
    backbone: WeightType,
    tables: RowType,
    head: WeightType | None,
    block_size: int,
    group_size: int | None,
    prefill_graph: bool | None,
    threads: int | None,
    max_kl: float | None = None,
) -> ExportOptions:
    """Fill in defaults; raises ExportError for values that do not exist."""
    head = head or backbone
    known = (
        ("backbone", backbone, WEIGHT_BITS),
        ("head", head, WEIGHT_BITS),
        ("tables", tables, ROW_BITS),
    )
    for name, value, choices in known:
        if value not in choices:
            raise ExportError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
    if group_size is None:
        group_size = 32 if tables == "int4" else 128
    for name, size in (("block_size", block_size), ("group_size", group_size)):
        if size not in (16, 32, 64, 128, 256):
            raise ExportError(f"{name} is {size}; expected 16, 32, 64, 128 or 256")
    if threads is not None and threads < 1:
        raise ExportError(f"threads is {threads}; expected at least 1")
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise ExportError(f"max_kl is {max_kl}; expected 0 nats or more, 0.1 for example")
    return ExportOptions(
        backbone=BackboneFormat(weights=backbone, head=head, block_size=block_size),
        tables=tables,
        group_size=group_size,
        prefill=backbone != "fp32" if prefill_graph is None else prefill_graph,
        prefill_asked=prefill_graph is True,
        threads=threads or os.cpu_count() or 1,
        max_kl=max_kl,
    )
