"""Chooses 4 or 8 bits for each matrix, by the divergence that 4 bits would cause."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from typing import cast

from msgspec.structs import replace as changed

from stem_edge.config import ModelConfig
from stem_edge.export.job.plan import Plan, kinds_of
from stem_edge.export.quantization.calibration import sequences
from stem_edge.export.quantization.sensitivity import Cost, costs
from stem_edge.graph.formats import VOCABULARY_KINDS, BackboneFormat, MatrixKind
from stem_edge.progress import Progress

# Share of the cost of rounding to nearest that remains with GPTQ. Measured with SmolLM2-135M-Instruct, on other text.
LEFT_BY_GPTQ = 0.312
LEFT_IN_SPLIT_HEAD = 0.11  # share of Cost.left that counts; set by the text that it was tried on
# Costs are measured on this many tokens: pieces from the whole text, joined to one sequence.
COST_TOKENS, PIECE_TOKENS = 128, 8
# Least values of a head that is stored as two matrices of 4 bits (BackboneFormat.split). With 67 million, it took longer
# than 8 bits; with 131 million and more, 0.66 to 0.85 of the time, without VNNI (docs/lab/2026-11-30-a-large-head.md).
LARGE_HEAD = 1 << 27


def choose_types(plan: Plan) -> Plan:
    """Return the plan with 8 bits for matrices that need them, unless the recipe sets types."""
    if not plan.format.packed:
        return plan
    source, config = plan.source, plan.source.config
    format = _stored_once(cast(BackboneFormat, plan.format), config)
    if plan.nats is not None and not kinds_of(config) <= plan.fixed:
        pieces = sequences(plan.text_ids, COST_TOKENS, config.max_context, PIECE_TOKENS)
        ids, layers = list(chain(*pieces))[: config.max_context], config.n_layers
        with Progress(layers, "choosing types", plan.recipe.progress, layers=layers) as bar:
            found = costs(source, ids, format.block_size, lambda: bar.advance(1), plan.recipe.cpus)
        usable = format.tied and not (format.offsets or config.ranges)
        large = usable and config.vocab_size * config.dim >= LARGE_HEAD
        if "head" in found and not large:
            found["head"] = found["head"]._replace(left=0.0)
        kinds, matrices = dict(format.kinds), dict(format.matrices)
        for name in _costly(format, found, plan.fixed, plan.nats):
            if name not in VOCABULARY_KINDS:
                matrices[name] = "int8"
            elif not format.tied:
                kinds[name] = "int8"
            else:
                kinds["embedding"] = "int8"
                if not large:
                    kinds["head"] = "int8"
        format = changed(format, kinds=kinds, matrices=matrices)
    return replace(plan, format=_stored_once(format, config))


def _stored_once(format: BackboneFormat, config: ModelConfig) -> BackboneFormat:
    """Set `tied` if embedding and head are one matrix in the model, and can share what is stored."""
    same = format.type_of("embedding") == format.type_of("head")
    split = changed(format, tied=True).split and not (format.offsets or config.ranges)
    return changed(format, tied=config.tied_head and (same or split))


def _costly(
    format: BackboneFormat,
    found: dict[str, Cost],
    fixed: Collection[MatrixKind],
    most_nats: float,
) -> list[str]:
    """List the matrix products to store with 8 bits, so that the others cost at most `most_nats`.

    found: product -> its cost (divergence) at 4 bits; fixed: kinds of matrices whose type is already chosen.
    """
    if format.tied and "head" in found:
        # Embedding and head are one matrix, so their costs add up.
        head = found["head"]
        found["head"] = head._replace(nats=head.nats + found.pop("embedding").nats)
    open_ = {name: cost for name, cost in found.items() if cost.kind not in fixed}
    gains = {
        name: LEFT_BY_GPTQ * cost.nats - LEFT_IN_SPLIT_HEAD * cost.left
        for name, cost in open_.items()
    }
    order = sorted(open_, key=lambda name: gains[name] / open_[name].values, reverse=True)
    nats = LEFT_BY_GPTQ * sum(cost.nats for cost in found.values())
    chosen: list[str] = []
    for name in order:
        if nats <= most_nats:
            break
        nats -= gains[name]
        chosen.append(name)
    return chosen
