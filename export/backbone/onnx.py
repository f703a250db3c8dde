"""Backbone for onnxruntime: its weights, those for prompts, and a graph for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.manifest import BACKBONE_GRAPH, FileEntry
from stem_edge.config import ModelConfig
from stem_edge.export.backbone.form import Form, Written
from stem_edge.export.backbone.weight_file import PaddedTensors, WeightFile, worth_balancing
from stem_edge.export.backbone.whole import whole
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.files import BundleFile, write_file
from stem_edge.export.job.job import Advance, Job, WriteStep
from stem_edge.export.job.storage import CALIBRATION_TOKENS, Format, StoredTypes
from stem_edge.export.job.stored_types import in_blocks
from stem_edge.export.quantization.calibration import sequences
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.quantization.hidden_states import HiddenStates
from stem_edge.export.quantization.kv_peaks import TEXT_TOKENS
from stem_edge.export.quantization.quantizers import Calibrated, Quantizer
from stem_edge.export.quantization.streams import MatrixPool
from stem_edge.ggml.types import TensorType
from stem_edge.graph.decode import decoding, prompts
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.quantize import F32
from stem_edge.progress import Progress
from stem_edge.tables.store import TableFormat

PREFILL_STEP = "prefill"


def planned_format(job: Job, peaks: dict[str, F32]) -> BackboneFormat:
    """Return the format with what the peaks decide (OnnxBackbone). Raises ExportError."""
    format = _onnx(job.format)
    described = job.source.config, job.layout
    decoding(*described, format)
    if not job.prefill:
        return format
    plain = prompts(*described, format).plan
    return msgspec.structs.replace(format, prefill=True, balanced=worth_balancing(peaks, plain))


def _onnx(format: Format) -> BackboneFormat:
    if not isinstance(format, BackboneFormat):
        raise TypeError(f"{format} is not for onnxruntime")
    return format


class OnnxForm(Form):
    """Weights and graphs, which onnxruntime runs."""

    exact = "--type fp32 --rows fp32"
    better = "--type near-lossless or fp32, --rows int8"

    def check(self, source: Checkpoint) -> None:
        """Accept all: each layer has its graph nodes."""

    def footprint(
        self, model: ModelConfig, format: Format, tables: TableFormat | None, *, prefill: bool
    ) -> Footprint:
        format = msgspec.structs.replace(_onnx(format), prefill=prefill)
        return expected_footprint(model, format, tables)

    def stored(self, config: ModelConfig, types: dict[str, TensorType]) -> StoredTypes:
        return in_blocks(config, types)

    def texts_of_peaks(self, job: Job) -> Sequence[list[int]]:
        tokens = min(TEXT_TOKENS, CALIBRATION_TOKENS)
        return sequences(job.text_ids, tokens, job.source.config.max_context)

    def steps(
        self, job: Job, peaks: dict[str, F32], written: Written, bar: Progress
    ) -> list[tuple[str, WriteStep]]:
        return OnnxBackbone(job, peaks).steps()


class OnnxBackbone:
    """Writer of one export's backbone. peaks: as Form.steps takes them."""

    def __init__(self, job: Job, peaks: dict[str, F32]) -> None:
        self._job, self._peaks = job, peaks
        self._format = planned_format(job, peaks)
        self._config, self._options = job.source.config, job.options
        self._tensors = PaddedTensors(self._config, job.source.backbone)

    def steps(self) -> list[tuple[str, WriteStep]]:
        """Return the name and function of each step."""
        steps: list[tuple[str, WriteStep]] = [("backbone", self._backbone)]
        if self._job.prefill:
            plan = prompts(self._config, self._job.layout, self._format).plan
            plain = Quantizer(self._format)
            steps.append((PREFILL_STEP, partial(self._write, plan, quantizer=plain)))
        return steps

    def _backbone(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        """Write the weights for decoding, and a graph over them for other tools."""
        described = self._config, self._job.layout, self._format
        plan, graph = decoding(*described).plan, self._job.folder / BACKBONE_GRAPH
        written = self._write(plan, meter, advance, quantizer=self._quantizer())
        return written | {graph: write_file(graph, encode(whole(*described)))}

    def _write(
        self,
        plan: WeightPlan,
        meter: ErrorMeter,
        advance: Advance,
        quantizer: Quantizer | None = None,
    ) -> dict[Path, FileEntry]:
        path = self._job.folder / plan.file
        with MatrixPool(self._options.cpus, meter, advance) as weights, BundleFile(path) as data:
            WeightFile(data, self._tensors, weights, quantizer, self._peaks).write(plan)
        return {path: data.entry}

    def _quantizer(self) -> Quantizer:
        if self._format.quantizer == "rtn":
            return Quantizer(self._format)
        ids = sequences(self._job.text_ids, CALIBRATION_TOKENS, self._config.max_context)
        states = HiddenStates(self._job.source, ids)
        return Calibrated(states, self._config, self._format)
