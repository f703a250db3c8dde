"""The backbone for onnxruntime: graphs for decoding and for prompts, with their weights."""

from __future__ import annotations

from pathlib import Path

from stem_edge import graph_io
from stem_edge.bundle import BACKBONE_DATA, PREFILL_DATA, BackboneFormat, FileEntry
from stem_edge.export.backbone import LayersBuilder, build_embed, build_head
from stem_edge.export.calibrated import Calibrated
from stem_edge.export.calibration import sequences
from stem_edge.export.files import BundleFile, write_file
from stem_edge.export.graph import Graph
from stem_edge.export.hidden_states import HiddenStates
from stem_edge.export.job import Advance, Job, Tell, Work
from stem_edge.export.layer import Source
from stem_edge.export.linear import DecodeLinear, Weights
from stem_edge.export.quantizers import Quantizer, Rounding, Searching
from stem_edge.export.report import ErrorMeter
from stem_edge.export.token_linear import TokenLinear
from stem_edge.export.variant_files import VariantPlan, plan_variants, write_variants
from stem_edge.quantize import F32

PREFILL_STEP = "prefill"


def planned_variants(job: Job) -> VariantPlan:
    """Variants of the graphs that an export writes. Raises ExportError if one cannot be."""
    format = job.options.backbone
    if not isinstance(format, BackboneFormat):
        return VariantPlan((), ())
    layout = job.tables.format.tables if job.tables else None
    return plan_variants(job.source.config, layout, format, job.options.variants)


class OnnxBackbone:
    """Writes the graphs of one export.

    peaks: greatest magnitude of every input channel [K], as stem_edge.export.calibration.observe
    has them.
    """

    def __init__(self, job: Job, format: BackboneFormat, peaks: dict[str, F32], tell: Tell) -> None:
        self._job, self._format, self._peaks, self._tell = job, format, peaks, tell
        self._config, self._options = job.source.config, job.options
        layout = job.tables.format.tables if job.tables else None
        self._layout, self._plan = layout, planned_variants(job)
        self._source = Source(self._config, layout, job.source.backbone)

    def steps(self) -> list[tuple[str, Work]]:
        """Name and work of each step."""
        steps: list[tuple[str, Work]] = [("backbone", self._backbone)]
        steps += [("variants", self._variants)] if self._plan.variants else []
        return steps + ([(PREFILL_STEP, self._prefill)] if self._options.prefill else [])

    def _backbone(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        """The graphs for decoding, their weights in one file."""
        path, quantizer = self._job.folder / BACKBONE_DATA, self._quantizer()
        weights = Weights(self._options.threads, meter, advance)
        graphs: dict[str, Graph] = {}
        try:
            with BundleFile(path) as data:
                linear: dict[str, DecodeLinear] = {}
                for name in graph_io.decode_graphs(self._config):
                    graphs[name] = Graph(data, BACKBONE_DATA)
                    linear[name] = DecodeLinear(graphs[name], weights, self._format, quantizer)
                embed, head = graph_io.EMBED, graph_io.HEAD
                build_embed(graphs[embed], self._source, linear[embed])
                for name, layers in graph_io.layer_graphs(self._config).items():
                    LayersBuilder(graphs[name], self._source, linear[name]).build(layers)
                build_head(graphs[head], self._source, linear[head])
        finally:
            weights.close()
        return {path: data.entry} | self._write_graphs(graphs)

    def _variants(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        """The graphs for accelerators, out of those for decoding."""
        return write_variants(self._job.folder, self._config, self._layout, self._plan.variants)

    def _quantizer(self) -> Quantizer:
        format, text = self._format, self._job.text_ids
        if format.quantizer == "rtn" or not format.quantized:
            return Rounding(asymmetric=format.asymmetric)
        if not len(text):
            return Searching(asymmetric=format.asymmetric)
        ids = sequences(text, self._options.calibration_tokens, self._config.max_context)
        return Calibrated(
            HiddenStates(self._job.source, ids),
            self._config,
            asymmetric=format.asymmetric,
            gptq=format.quantizer == "gptq",
            tell=self._tell,
        )

    def _prefill(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        path = self._job.folder / PREFILL_DATA
        weights = Weights(self._options.threads, meter, advance)
        try:
            with BundleFile(path) as data:
                graph = Graph(data, PREFILL_DATA)
                linear = TokenLinear(graph, weights, self._peaks)
                LayersBuilder(graph, self._source, linear).build(range(self._config.n_layers))
        finally:
            weights.close()
        return {path: data.entry} | self._write_graphs({graph_io.PREFILL: graph})

    def _write_graphs(self, graphs: dict[str, Graph]) -> dict[Path, FileEntry]:
        paths = {self._job.folder / graph_io.graph_file(name): g for name, g in graphs.items()}
        return {path: write_file(path, graph.serialize()) for path, graph in paths.items()}
