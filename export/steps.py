"""What an export writes, step by step: tokenizer, graphs with their weights, table store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge import graph_io
from stem_edge.bundle import (
    BACKBONE_DATA,
    PREFILL_DATA,
    TABLES,
    TOKEN_COUNTS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
)
from stem_edge.export.backbone import LayersBuilder, build_embed, build_head
from stem_edge.export.calibrated import Calibrated
from stem_edge.export.calibration import sequences
from stem_edge.export.checkpoint import Checkpoint
from stem_edge.export.files import BundleFile, write_file
from stem_edge.export.graph import Graph
from stem_edge.export.hidden_states import HiddenStates
from stem_edge.export.layer import Source
from stem_edge.export.linear import DecodeLinear, Weights
from stem_edge.export.options import ExportOptions
from stem_edge.export.quantizers import Quantizer, Rounding, Searching
from stem_edge.export.report import ErrorMeter
from stem_edge.export.table_plan import TablePlan
from stem_edge.export.tables import TableWriter
from stem_edge.export.token_linear import TokenLinear
from stem_edge.export.tokenizer import ExportedTokenizer
from stem_edge.quantize import F32
from stem_edge.token_counts import Counts, encode_counts

PREFILL_STEP = "prefill"
Advance = Callable[[int], object]
Work = Callable[[ErrorMeter, Advance], dict[Path, FileEntry]]


@dataclass(frozen=True)
class Job:
    """What is exported, how, and where to."""

    folder: Path
    source: Checkpoint
    converted: ExportedTokenizer
    options: ExportOptions
    text_ids: npt.NDArray[np.int64]  # of the calibration text; empty without one
    counts: Counts
    tables: TablePlan | None  # of a dense model: None

    @property
    def total(self) -> int:
        """Bytes of what is read, as float32; the layers are read again for the prefill graph."""
        config = self.source.config
        parameters = config.backbone_parameters + config.table_parameters
        if self.options.prefill:
            shapes = config.backbone_shapes().items()
            layers = [s for name, s in shapes if name.startswith("layers.") and len(s) == 2]
            parameters += sum(rows * width for rows, width in layers)
        return 4 * parameters


class Steps:
    """Each is of some whole files, so that an interrupted export goes on after the last one."""

    def __init__(self, job: Job, peaks: dict[str, F32], tell: Callable[[str], object]) -> None:
        self._job, self._peaks, self._tell = job, peaks, tell
        self._config, self._options = job.source.config, job.options
        layout = job.tables.format.tables if job.tables else None
        self._source = Source(self._config, layout, job.source.backbone)

    def all(self) -> list[tuple[str, Work]]:
        """Name and work of each step: work(meter, advance) writes and returns files."""
        steps: list[tuple[str, Work]] = [
            ("tokenizer", self._tokenizer),
            ("backbone", self._backbone),
        ]
        if self._options.prefill:
            steps.append((PREFILL_STEP, self._prefill))
        if self._job.tables is not None:
            root, tables = self._job.folder / TABLES, self._job.source.tables
            steps += TableWriter(root, self._job.tables, tables, self._options.threads).steps()
        return steps

    def _tokenizer(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        converted = self._job.converted
        config = msgspec.json.encode(converted.config, order="sorted")
        contents = {
            TOKENIZER: converted.json.encode(),
            TOKENIZER_CONFIG: msgspec.json.format(config, indent=1) + b"\n",
        }
        if len(self._job.text_ids):
            contents[TOKEN_COUNTS] = encode_counts(self._job.counts)
        paths = {self._job.folder / name: data for name, data in contents.items()}
        return {path: write_file(path, data) for path, data in paths.items()}

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
                    linear[name] = DecodeLinear(
                        graphs[name], weights, self._options.backbone, quantizer
                    )
                embed, head = graph_io.EMBED, graph_io.HEAD
                build_embed(graphs[embed], self._source, linear[embed])
                for name, layers in graph_io.layer_graphs(self._config).items():
                    LayersBuilder(graphs[name], self._source, linear[name]).build(layers)
                build_head(graphs[head], self._source, linear[head])
        finally:
            weights.close()
        return {path: data.entry} | self._write_graphs(graphs)

    def _quantizer(self) -> Quantizer:
        format, text = self._options.backbone, self._job.text_ids
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
