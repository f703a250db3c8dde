"""Types of an export's matrices, chosen by what 4 bits cost in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from msgspec.structs import replace

from stem_edge.bundle.expected import kinds_of
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.quantization.calibration import guiding
from stem_edge.export.quantization.sensitivity import costs
from stem_edge.graph.formats import VOCABULARY_KINDS, BackboneFormat, MatrixKind
from stem_edge.numerics.quantize import I64

# Share of the cost of rounding that GPTQ leaves. Found with SmolLM2-135M-Instruct, on other text.
LEFT_BY_GPTQ = 0.312
# Pieces of the text that costs are measured on, one after the other, and the tokens of each.
PIECES, PIECE_TOKENS = 16, 12


def stored_once(config: ModelConfig, format: BackboneFormat) -> BackboneFormat:
    """Return the format with a matrix that is embedding and head once, if both have its type."""
    same = format.type_of("embedding") == format.type_of("head")
    return replace(format, tied=config.tied_head and same)


def choose_types(
    source: Checkpoint,
    format: BackboneFormat,
    fixed: Iterable[MatrixKind],
    most_nats: float,
    text_ids: I64,
    layer_done: Callable[[], object] = lambda: None,
) -> BackboneFormat:
    """Return the format with 8 bits for the matrices that lose most at 4 bits for their bytes.

    format: has 4 bits everywhere; fixed: kinds that keep their type; most_nats: what 4 bits may cost.
    """
    if kinds_of(source.config) <= {*fixed}:
        return format
    found = costs(
        source, _from_all_over(text_ids, source.config.max_context), format.block_size, layer_done
    )
    if format.tied and "head" in found:
        # One matrix, which costs in both places.
        head = found["head"]
        found["head"] = head._replace(nats=head.nats + found.pop("embedding").nats)
    open_ = {name: cost for name, cost in found.items() if cost.kind not in fixed}
    order = sorted(open_, key=lambda name: open_[name].nats / open_[name].values, reverse=True)
    nats = LEFT_BY_GPTQ * sum(cost.nats for cost in found.values())
    chosen: list[str] = []
    for name in order:
        if nats <= most_nats:
            break
        nats -= LEFT_BY_GPTQ * open_[name].nats
        chosen.append(name)
    return _with_eight_bits(format, chosen)


def _from_all_over(text_ids: I64, max_context: int) -> list[int]:
    """Return pieces of a text, one after the other."""
    text_ids = guiding(text_ids)
    length = min(PIECE_TOKENS, len(text_ids))
    starts = np.linspace(0, len(text_ids) - length, PIECES).astype(int)
    pieces = [text_ids[start : start + length] for start in starts]
    found: list[int] = np.concatenate(pieces)[:max_context].tolist()
    return found


def _with_eight_bits(format: BackboneFormat, chosen: Iterable[str]) -> BackboneFormat:
    kinds, matrices = dict(format.kinds), dict(format.matrices)
    for name in chosen:
        if name in VOCABULARY_KINDS:
            kinds[name] = "int8"
            if format.tied:
                kinds["embedding"] = "int8"
        else:
            matrices[name] = "int8"
    return replace(format, kinds=kinds, matrices=matrices)
