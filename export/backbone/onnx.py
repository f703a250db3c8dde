"""Writes the backbone for onnxruntime: weights for decoding, weights for prompts, an ONNX graph."""

from __future__ import annotations

from typing import cast

import msgspec

from stem_edge.export.backbone.weight_file import PaddedTensors, WeightFile, worth_balancing
from stem_edge.export.backbone.whole import whole
from stem_edge.export.job.files import Output
from stem_edge.export.job.plan import Plan, begin_layers
from stem_edge.export.quantization.hidden_states import HiddenStates
from stem_edge.export.quantization.quantizers import Quantizer, calibrated, nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph.decode import decoding
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BACKBONE_GRAPH, PREFILL_DATA, BackboneFormat
from stem_edge.graph.prompt_products import prompts
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.quantize import F32


def onnx_nbytes(plan: Plan) -> tuple[int, int]:
    """Return the sizes of the weights for decoding and for prompts (0: none). Raises GraphError."""
    described = plan.source.config, plan.layout, _planned_format(plan, {})
    prefill = prompts(*described).plan.nbytes if plan.prefill else 0
    return decoding(*described).plan.nbytes, prefill


def _planned_format(plan: Plan, peaks: dict[str, F32]) -> BackboneFormat:
    """Return plan.format and, for prompts, which products need SmoothQuant (peaks: write_onnx)."""
    format = cast(BackboneFormat, plan.format)
    if not plan.prefill:
        return format
    plain = prompts(plan.source.config, plan.layout, format).plan
    return msgspec.structs.replace(format, prefill=True, balanced=worth_balancing(peaks, plain))


def write_onnx(plan: Plan, out: Output, peaks: dict[str, F32]) -> BackboneFormat:
    """Write the weights for decoding, an ONNX graph for other tools, and the weights for prompts.

    Returns the format of the backbone. It records whether there are weights for prompts.
    peaks: name of a matrix input -> greatest magnitude of each channel [K], for SmoothQuant factors.
    """
    format = _planned_format(plan, peaks)
    described = plan.source.config, plan.layout, format
    tensors = PaddedTensors(plan.source.config, plan.source.backbone)

    def write(what: str, weights: WeightPlan, quantizer: Quantizer) -> None:
        begin_layers(out.bar, what, plan.source.config)
        reader = MatrixReader(plan.recipe.cpus, out.bar.advance)
        with out.file(weights.file) as data:
            rounded = weights.file == PREFILL_DATA or format.quantizer == "rtn"
            same = rounded and not format.asymmetric  # codes as in a GGUF file's blocks
            file = WeightFile(data, tensors, reader, quantizer, peaks, keeps_blocks=same)
            file.write(weights)

    quantizer = nearest(format)
    if format.quantizer != "rtn":
        states = HiddenStates(plan.source, plan.guides, plan.recipe.cpus)
        quantizer = calibrated(states, plan.source.config, format)
    write("writing weights", decoding(*described).plan, quantizer)
    out.write(BACKBONE_GRAPH, encode(whole(*described)))
    if plan.prefill:
        write("writing weights for prompts", prompts(*described).plan, nearest(format))
    return format
