"""Types of an export's matrices, chosen by what 4 bits cost in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

import numpy as np
from msgspec.structs import replace

from stem_edge.bundle.expected import kinds_of
from stem_edge.bundle.footprint import matrix_nbytes
from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.quantization.calibration import guiding
from stem_edge.export.quantization.sensitivity import Cost, costs
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import VOCABULARY_KINDS, BackboneFormat, MatrixKind
from stem_edge.numerics.quantize import I64
from stem_edge.tables.rows import RecordLayout
from stem_edge.units import format_size

Quality = Literal["small", "balanced", "near-lossless"]
QUALITIES: tuple[Quality, ...] = get_args(Quality)
# Quality -> divergence in nats that its 4-bit matrices may cost; near-lossless has no such ones.
# With 0.042, SmolLM2-135M-Instruct is no further off than with llama.cpp's Q4_K_M, in fewer bytes.
BOUNDS: dict[str, float] = {"small": 0.1, "balanced": 0.042}
# Share of the cost of rounding that GPTQ leaves. Found with SmolLM2-135M-Instruct, on other text.
LEFT_BY_GPTQ = 0.312
# Pieces of the text that costs are measured on, one after the other, and the tokens of each.
PIECES, PIECE_TOKENS = 16, 12


class Target(NamedTuple):
    """What the types of an export are chosen for: a bound in nats, or a size in bytes."""

    nats: float | None = None
    nbytes: int | None = None  # of the backbone's weights


def stored_once(config: ModelConfig, format: BackboneFormat) -> BackboneFormat:
    """Return the format with a matrix that is embedding and head once, if both have its type."""
    same = format.type_of("embedding") == format.type_of("head")
    return replace(format, tied=config.tied_head and same)


def choose_types(
    source: Checkpoint,
    layout: RecordLayout | None,
    format: BackboneFormat,
    fixed: Iterable[MatrixKind],
    target: Target,
    text_ids: I64,
    layer_done: Callable[[], object] = lambda: None,
) -> BackboneFormat:
    """Return the format with 8 bits for the matrices that lose most at 4 bits for their bytes.

    format: has 4 bits everywhere; fixed: kinds that keep their type. Raises ExportError if even
    4 bits everywhere exceed the size.
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
    nbytes = decoding(source.config, layout, format).plan.nbytes
    if target.nbytes is not None and nbytes > target.nbytes:
        raise ExportError(
            f"{source.path}: its weights take {format_size(nbytes)} with 4 bits everywhere, size "
            f"allows {format_size(target.nbytes)}; give more, or export for --engine gguf"
        )
    chosen: list[str] = []
    for name in order:
        if target.nats is not None and nats <= target.nats:
            break
        more = _more_nbytes(source, format, open_[name])
        if target.nbytes is not None and nbytes + more > target.nbytes:
            continue
        nats -= LEFT_BY_GPTQ * open_[name].nats
        nbytes += more
        chosen.append(name)
    return _with_eight_bits(source, format, chosen)


def _from_all_over(text_ids: I64, max_context: int) -> list[int]:
    """Return pieces of a text, one after the other."""
    text_ids = guiding(text_ids)
    length = min(PIECE_TOKENS, len(text_ids))
    starts = np.linspace(0, len(text_ids) - length, PIECES).astype(int)
    pieces = [text_ids[start : start + length] for start in starts]
    found: list[int] = np.concatenate(pieces)[:max_context].tolist()
    return found


def _more_nbytes(source: Checkpoint, format: BackboneFormat, cost: Cost) -> int:
    width = source.config.dim  # of most; blocks are alike for the others
    rows, zeros = cost.values // width, format.asymmetric
    four, eight = (
        matrix_nbytes(rows, width, stored, format.block_size, zero_points=zeros)
        for stored in ("int4", "int8")
    )
    return eight - four


def _with_eight_bits(
    source: Checkpoint, format: BackboneFormat, chosen: Iterable[str]
) -> BackboneFormat:
    kinds, matrices = dict(format.kinds), dict(format.matrices)
    for name in chosen:
        if name in VOCABULARY_KINDS:
            kinds[name] = "int8"
            if format.tied:
                kinds["embedding"] = "int8"
        else:
            matrices[name] = "int8"
    return replace(format, kinds=kinds, matrices=matrices)
