"""The assistant of a model, in the bundle beside its backbone for onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from msgspec.structs import replace

from stem_edge.errors import ExportError
from stem_edge.export.backbone.weight_file import PaddedTensors, WeightFile
from stem_edge.export.checkpoints.assistant import read_assistant
from stem_edge.export.job.files import Output
from stem_edge.export.job.plan import AssistantPart, Plan, plain_format
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.quantization.quantizers import nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph.formats import Assistant, BackboneFormat
from stem_edge.graph.special.assistant import ORDER, drafting


def assistant_part(path: Path, plan: Plan) -> AssistantPart:
    """Read an assistant. Raises CheckpointError; ExportError if it is not for this model."""
    target, format = (
        plan.source.config,
        cast(BackboneFormat, plan.format),
    )  # the recipe refuses other engines
    source = read_assistant(path, target.dim)
    measured = plan.nats is not None or plan.own_types
    described = Assistant(
        model=source.config,
        format=replace(
            plain_format("int8" if measured else format.weights), quantizer="rtn", kv_peaks=False
        ),
        clusters=len(source.order),
        best=source.best,
    )
    try:
        weights = drafting(described, target, format)[1]
    except ValueError as error:
        raise ExportError(f"{path}: cannot be the assistant of this model: {error}") from error
    return AssistantPart(source, described, weights)


def write_assistant(part: AssistantPart, out: Output, threads: int) -> None:
    """Write the weights of an assistant; what is lost is no part of the report."""
    tensors = PaddedTensors(part.source.config, part.source.tensors)
    format, order = part.described.format, {ORDER: part.source.order}
    reader = MatrixReader(threads, ErrorMeter(), lambda _: None)
    with out.file(part.weights.file) as data:
        kept = not format.asymmetric
        file = WeightFile(data, tensors, reader, nearest(format), order, keeps_blocks=kept)
        file.write(part.weights)
