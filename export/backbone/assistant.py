"""Writes Gemma 4's draft model ("assistant") into a bundle. Only the onnxruntime engine runs it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from msgspec.structs import replace

from stem_edge.errors import ExportError
from stem_edge.export.backbone.weight_file import PaddedTensors, WeightFile
from stem_edge.export.checkpoints.assistant import AssistantCheckpoint, read_assistant
from stem_edge.export.job.files import Output
from stem_edge.export.job.plan import Plan, plain_format
from stem_edge.export.quantization.quantizers import nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.special.assistant import ORDER, drafting


def open_assistant(path: Path, plan: Plan) -> AssistantCheckpoint:
    """Open a draft model's folder. Raises CheckpointError; ExportError if it fits another model."""
    # The cast is safe: a recipe for ggml cannot have an assistant.
    target, format = plan.source.config, cast(BackboneFormat, plan.format)
    measured = plan.nats is not None or plan.own_types
    stored = plain_format("int8" if measured else format.weights)
    own = read_assistant(path, target.dim, replace(stored, quantizer="rtn", kv_peaks=False))
    try:
        drafting(own.described, target, format)
    except ValueError as error:
        raise ExportError(f"{path}: cannot be the assistant of this model: {error}") from error
    return own


def write_assistant(own: AssistantCheckpoint, plan: Plan, out: Output) -> None:
    """Write a draft model's weights into the bundle."""
    format, order = own.described.format, {ORDER: own.cluster_ids}
    target = plan.source.config, cast(BackboneFormat, plan.format)
    weights = drafting(own.described, *target)[1]
    tensors = PaddedTensors(own.described.model, own.tensors)
    reader = MatrixReader(plan.recipe.cpus, lambda _: None)
    with out.file(weights.file) as data:
        kept = not format.asymmetric
        file = WeightFile(data, tensors, reader, nearest(format), order, keeps_blocks=kept)
        file.write(weights)
