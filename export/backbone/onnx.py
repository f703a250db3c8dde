"""Backbone for onnxruntime: its weights, those for prompts, and a graph for other tools."""

from __future__ import annotations

from typing import cast

import msgspec

from stem_edge.bundle.manifest import BACKBONE_GRAPH
from stem_edge.export.backbone.weight_file import PaddedTensors, WeightFile, worth_balancing
from stem_edge.export.backbone.whole import whole
from stem_edge.export.job.files import Output
from stem_edge.export.job.job import Job, begin_layers
from stem_edge.export.job.storage import CALIBRATION_TOKENS
from stem_edge.export.quantization.calibration import sequences
from stem_edge.export.quantization.hidden_states import HiddenStates
from stem_edge.export.quantization.quantizers import Quantizer, calibrated, nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph.decode import decoding, prompts
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.quantize import F32

PREFILL = "prefill"  # the part of a bundle that quality_check may drop


def planned_format(job: Job, peaks: dict[str, F32]) -> BackboneFormat:
    """Return the format with the products that are balanced for prompts. Raises ExportError.

    peaks: input -> greatest magnitude of each of its channels [K], as calibration.observe returns.
    """
    format = cast(BackboneFormat, job.format)
    if not job.prefill:
        return format
    plain = prompts(job.source.config, job.layout, format).plan
    return msgspec.structs.replace(format, prefill=True, balanced=worth_balancing(peaks, plain))


def write_onnx(job: Job, out: Output, peaks: dict[str, F32]) -> None:
    """Write the weights for decoding, a graph over them for other tools, and weights for prompts.

    peaks: as planned_format takes them.
    """
    format = planned_format(job, peaks)
    described = job.source.config, job.layout, format
    tensors = PaddedTensors(job.source.config, job.source.backbone)

    def write(part: str, what: str, plan: WeightPlan, quantizer: Quantizer) -> None:
        begin_layers(out.bar, what, job.source.config)
        weights = MatrixReader(job.recipe.cpus, out.meter(part), out.bar.advance)
        with out.file(plan.file) as data:
            rounded = part == PREFILL or format.quantizer == "rtn"
            same = rounded and not format.asymmetric  # as the blocks of a GGUF file
            file = WeightFile(data, tensors, weights, quantizer, peaks, keeps_blocks=same)
            file.write(plan)

    write("backbone", "writing weights", decoding(*described).plan, _quantizer(job, format))
    out.write(BACKBONE_GRAPH, encode(whole(*described)))
    if job.prefill:
        plan = prompts(*described).plan
        write(PREFILL, "writing weights for prompts", plan, nearest(format))


def _quantizer(job: Job, format: BackboneFormat) -> Quantizer:
    if format.quantizer == "rtn":
        return nearest(format)
    config = job.source.config
    ids = sequences(job.text_ids, CALIBRATION_TOKENS, config.max_context)
    return calibrated(HiddenStates(job.source, ids), config, format)
