"""The order of an export: read, convert, write, compare, publish."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from stem_edge import graph_io
from stem_edge.bundle import (
    BACKBONE_DATA,
    FORMAT_VERSION,
    MANIFEST,
    PREFILL_DATA,
    TABLES,
    TOKEN_COUNTS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHT_BITS,
    Bundle,
    FileEntry,
    Manifest,
    QualityReport,
    WeightType,
    encode_manifest,
    open_bundle,
)
from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError, ExportError
from stem_edge.export.backbone import LayersBuilder, Source, build_embed, build_head, make_linear
from stem_edge.export.calibration import observe, probe_ids, read_token_ids
from stem_edge.export.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.files import BundleFile, publish, write_file
from stem_edge.export.graph import Graph
from stem_edge.export.journal import Journal, subject
from stem_edge.export.linear import TokenLinear, Weights
from stem_edge.export.lingua import read_checkpoint
from stem_edge.export.options import ExportOptions, make_options
from stem_edge.export.probe import Comparison, check_divergence, compare_logits
from stem_edge.export.report import ErrorMeter, errors
from stem_edge.export.tables import make_grid, write_metadata, write_shard
from stem_edge.export.tokenizer import ExportedTokenizer, convert_tokenizer
from stem_edge.progress import Progress
from stem_edge.quantize import F32
from stem_edge.rows import RecordLayout, RowType, make_layout
from stem_edge.token_counts import count_tokens, encode_counts

PREFILL_STEP = "prefill"
Advance = Callable[[int], object]


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    backbone: WeightType = "int4",
    tables: RowType = "int8",
    tokenizer: str | Path | None = None,
    head: WeightType | None = None,
    block_size: int = 128,
    group_size: int | None = None,
    prefill_graph: bool | None = None,
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Bundle:
    """Export a checkpoint of the public STEM trainer to a bundle in the folder `out`.

    backbone: "int4", "int8" or "fp32" matrices in the layers.
    tables: "int8", "int4", "fp16" or "fp32" rows.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    head: type of embedding and head. Default: as the backbone.
    block_size, group_size: values that share a scale in the backbone and in the tables. Default:
        128, and 32 in int4 tables. Smaller blocks are more exact and slower.
    prefill_graph: add int8 matrices for prompts, a byte a parameter of the layers. Default: with a
        quantized backbone, if they are no less exact than it is.
    calibration: a text, or token ids as .npy or .int32, of the kind that the model will see: it
        warms the row cache, and balances the channels of the prefill graph.
    max_kl: fail if the mean divergence from the checkpoint, in nats, on a few tokens (the first of
        the calibration text) is greater: of what decodes, and of the prefill graph.
    force: replace an existing bundle; it stays whole until the new one is.
    progress: show a progress bar on stderr. Default: if that is a terminal.

    An export that was killed goes on where it stood when it is started again. Raises
    CheckpointError, ExportError; then `out` is what it was.
    """
    options = make_options(
        backbone, tables, head, block_size, group_size, prefill_graph, threads, max_kl
    )
    source = read_checkpoint(checkpoint)
    converted = _tokenizer(source, tokenizer)
    source = replace(source, config=_with_special_tokens(source, converted))
    text_ids = read_token_ids(
        Path(calibration) if calibration else None, converted, source.config.vocab_size
    )
    out = Path(out)
    with publish(out, force=force) as folder:
        text_hash = hashlib.sha256(text_ids.tobytes()).hexdigest()
        described = subject((options.described(), converted.json, text_hash), source.path)
        export = _Export(folder, source, converted, options, text_ids, Journal(folder, described))
        with Progress(export.total, "exporting", progress) as bar:
            export.run(bar)
    return open_bundle(out)


class _Export:
    """One export into a working folder."""

    def __init__(
        self,
        folder: Path,
        source: Checkpoint,
        converted: ExportedTokenizer,
        options: ExportOptions,
        text_ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        journal: Journal,
    ) -> None:
        self.folder, self.source, self.converted = folder, source, converted
        self.options, self.journal, self.text_ids = options, journal, text_ids
        self.config, self.layout = source.config, _layout(source, options)
        self.graphs = Source(source.config, self.layout, source.backbone)
        # Bytes of what is read, as float32; the layers are read again for the prefill graph.
        self.total = 4 * (self.config.backbone_parameters + self.config.table_parameters)
        self.total += 4 * _layer_parameters(self.config) if options.prefill else 0

    def run(self, bar: Progress) -> None:
        """All steps that are not done yet, and the manifest."""
        bar.advance(self.journal.progress)
        bar.describe("computing with the checkpoint")
        ids = probe_ids(self.text_ids, self.converted, self.config.max_context)
        expected, peaks = observe(self.source, ids)
        bar.describe("exporting")
        for name, work in self._steps(peaks):
            self.journal.run(name, work, bar.advance)
        bar.describe("comparing with the checkpoint")
        manifest = self._compare(ids, expected)
        self.journal.close()
        write_file(self.folder / MANIFEST, encode_manifest(manifest))

    def _steps(self, peaks: dict[str, F32]) -> list[tuple[str, _Work]]:
        steps: list[tuple[str, _Work]] = [
            ("tokenizer", self._write_tokenizer),
            ("backbone", self._write_backbone),
        ]
        if self.options.prefill:
            steps.append((PREFILL_STEP, partial(self._write_prefill, peaks)))
        if self.layout is None:
            return steps
        grid = make_grid(self.folder / TABLES, self.layout)
        steps.append(("tables", lambda meter, advance: write_metadata(grid)))
        for shard in range(grid.shards):
            steps.append((f"shard {shard}", partial(self._write_shard, shard)))
        return steps

    def _write_tokenizer(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        config = msgspec.json.encode(self.converted.config, order="sorted")
        contents = {
            TOKENIZER: self.converted.json.encode(),
            TOKENIZER_CONFIG: msgspec.json.format(config, indent=1) + b"\n",
        }
        if len(self.text_ids):
            counts = count_tokens(self.text_ids, self.config.vocab_size)
            contents[TOKEN_COUNTS] = encode_counts(counts)
        paths = {self.folder / name: data for name, data in contents.items()}
        return {path: write_file(path, data) for path, data in paths.items()}

    def _write_backbone(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        """The graphs for decoding, their weights in one file."""
        path, format = self.folder / BACKBONE_DATA, self.options.backbone
        weights = Weights(self.options.threads, meter, advance)
        graphs: dict[str, Graph] = {}
        try:
            with BundleFile(path) as data:
                for name in graph_io.decode_graphs(self.config):
                    graphs[name] = Graph(data, BACKBONE_DATA)
                build_embed(graphs[graph_io.EMBED], self.graphs, weights, format)
                for name, layers in graph_io.layer_graphs(self.config).items():
                    bits = WEIGHT_BITS[format.weights]
                    linear = make_linear(graphs[name], weights, bits, format.block_size)
                    LayersBuilder(graphs[name], self.graphs, linear).build(layers)
                bits = WEIGHT_BITS[format.head]
                linear = make_linear(graphs[graph_io.HEAD], weights, bits, format.block_size)
                build_head(graphs[graph_io.HEAD], self.graphs, linear)
        finally:
            weights.close()
        return {path: data.entry} | self._write_graphs(graphs)

    def _write_prefill(
        self, peaks: dict[str, F32], meter: ErrorMeter, advance: Advance
    ) -> dict[Path, FileEntry]:
        path = self.folder / PREFILL_DATA
        weights = Weights(self.options.threads, meter, advance)
        try:
            with BundleFile(path) as data:
                graph = Graph(data, PREFILL_DATA)
                linear = TokenLinear(graph, weights, peaks)
                LayersBuilder(graph, self.graphs, linear).build(range(self.config.n_layers))
        finally:
            weights.close()
        return {path: data.entry} | self._write_graphs({graph_io.PREFILL: graph})

    def _write_graphs(self, graphs: dict[str, Graph]) -> dict[Path, FileEntry]:
        paths = {self.folder / graph_io.graph_file(name): g for name, g in graphs.items()}
        return {path: write_file(path, graph.serialize()) for path, graph in paths.items()}

    def _write_shard(
        self, shard: int, meter: ErrorMeter, advance: Advance
    ) -> dict[Path, FileEntry]:
        if self.layout is None:
            return {}
        grid = make_grid(self.folder / TABLES, self.layout)
        return write_shard(grid, shard, self.source.tables, meter, self.options.threads, advance)

    def _compare(self, ids: list[int], expected: F32) -> Manifest:
        """The manifest with what the new bundle computes, as a user would load it.

        A prefill graph that is less exact than the other graphs goes, unless it was asked for.
        """
        decode = self._measure(ids, expected, prefill=False)
        notes, prefill = self.source.notes, None
        if self.options.prefill:
            prefill = self._measure(ids, expected, prefill=True)
            if prefill.divergence > decode.divergence and not self.options.prefill_asked:
                found = (
                    f"{prefill.divergence:g} nats, that of the other graphs {decode.divergence:g}"
                )
                notes += (f"no prefill graph: its divergence from the checkpoint was {found}",)
                self.journal.forget(PREFILL_STEP)
                prefill = None
        greatest = max(found.divergence for found in (decode, prefill) if found)
        check_divergence(greatest, self.options.max_kl, self.source.path, len(ids))
        manifest = self._manifest(prefill=prefill is not None)
        report = msgspec.structs.replace(
            manifest.report,
            notes=notes,
            probe_tokens=tuple(ids),
            worst_logit_difference=decode.worst_difference,
            greatest_logit=float(f"{np.abs(expected).max():.3g}"),
            divergence=decode.divergence,
            prefill_divergence=prefill.divergence if prefill else None,
            divergence_99=decode.divergence_99,
            agreement=decode.agreement,
        )
        return msgspec.structs.replace(manifest, report=report)

    def _measure(self, ids: list[int], expected: F32, *, prefill: bool) -> Comparison:
        path = self.folder / MANIFEST
        write_file(path, encode_manifest(self._manifest(prefill=prefill)))
        try:
            return compare_logits(
                self.folder, ids, expected, self.options.threads, prefill_graph=prefill
            )
        finally:
            path.unlink()

    def _manifest(self, *, prefill: bool) -> Manifest:
        files = self.journal.files()
        tables = sum(e.nbytes for name, e in files.items() if name.startswith(TABLES + "/"))
        backbone = sum(e.nbytes for name, e in files.items() if ".onnx" in name)
        return Manifest(
            format_version=FORMAT_VERSION,
            model=self.config,
            backbone=msgspec.structs.replace(self.options.backbone, prefill=prefill),
            tables=self.layout,
            files=files,
            report=QualityReport(
                checkpoint_nbytes=self.source.nbytes,
                backbone_nbytes=backbone,
                tables_nbytes=tables,
                errors=errors(step.totals for step in self.journal.steps.values()),
                probe_tokens=(),
                worst_logit_difference=0.0,
                greatest_logit=0.0,
                divergence=0.0,
            ),
        )


_Work = Callable[[ErrorMeter, Advance], dict[Path, FileEntry]]


def _tokenizer(source: Checkpoint, override: str | Path | None) -> ExportedTokenizer:
    wanted = source.tokenizer
    if override is not None:
        wanted = TokenizerSource("json", Path(override), wanted.add_bos)
    converted = convert_tokenizer(wanted.kind, wanted.path, add_bos=wanted.add_bos)
    if converted.vocab_size > source.config.vocab_size:
        raise CheckpointError(
            f"{wanted.path or wanted.kind}: the tokenizer has {converted.vocab_size} ids, the model "
            f"{source.config.vocab_size}; give the model's own with --tokenizer tokenizer.json"
        )
    return converted


def _with_special_tokens(source: Checkpoint, converted: ExportedTokenizer) -> ModelConfig:
    return msgspec.structs.replace(
        source.config, bos_id=converted.bos_id, eos_ids=converted.eos_ids
    )


def _layout(source: Checkpoint, options: ExportOptions) -> RecordLayout | None:
    config = source.config
    if not config.stem_layers:
        return None
    try:
        return make_layout(
            config.vocab_size, config.stem_layers, config.d_ff, options.tables, options.group_size
        )
    except ValueError as error:
        raise ExportError(f"{source.path}: {options.tables} tables do not fit: {error}") from error


def _layer_parameters(config: ModelConfig) -> int:
    shapes = config.backbone_shapes()
    return sum(
        shape[0] * shape[1]
        for name, shape in shapes.items()
        if name.startswith("layers.") and len(shape) == 2
    )
