"""Quality report: what the exporter measured of a backbone, as the manifest keeps it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stem_edge.limits import MAX_VOCAB
from stem_edge.units import MAX_SIZE

# Bounded, because a damaged size must not reach arithmetic that cannot hold it.
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCAB)]


class KindError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantization error of a kind of tensor: |stored - original| / max |original| of the row."""

    worst: float
    mean: float


class QualityReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Size and quality of a backbone, measured while exporting."""

    checkpoint_nbytes: Size  # of the tensors that were read
    backbone_nbytes: Size
    tables_nbytes: Size
    errors: dict[str, KindError]
    probe_tokens: tuple[TokenId, ...]  # ids over which logits are compared
    worst_logit_difference: float  # bundle from checkpoint, over the whole probe
    greatest_logit: float  # of the checkpoint, to judge that by
    divergence: float  # mean Kullback-Leibler divergence from the checkpoint, in nats
    prefill_divergence: float | None = None  # of the prefill graph from the checkpoint, if any
    # Of the prefill graph from the decoding graph, on the machine that exported.
    prefill_from_decode: Annotated[float, msgspec.Meta(ge=0)] | None = None
    # None in older bundles, which did not measure them.
    divergence_99: float | None = None  # 99th percentile of the divergence over the probe
    agreement: float | None = None  # share of the probe where the most probable token is the same
    notes: tuple[str, ...] = ()  # remarks of the exporter, a sentence each
