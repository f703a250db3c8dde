"""The order of an export: read, convert, write, compare, publish."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stem_edge.bundle import (
    BACKBONE,
    BACKBONE_DATA,
    FORMAT_VERSION,
    MANIFEST,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHT_BITS,
    BackboneFormat,
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
from stem_edge.export.backbone import BackboneBuilder
from stem_edge.export.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.files import BundleFile, publish, write_file
from stem_edge.export.graph import Graph
from stem_edge.export.lingua import read_checkpoint
from stem_edge.export.probe import compare_logits
from stem_edge.export.report import ErrorMeter
from stem_edge.export.tables import make_grid, write_tables
from stem_edge.export.tokenizer import ExportedTokenizer, convert_tokenizer
from stem_edge.progress import Progress
from stem_edge.rows import ROW_BITS, RecordLayout, RowType, make_layout


@dataclass(frozen=True)
class _Options:
    """The checked options of one export."""

    backbone: BackboneFormat
    tables: RowType
    group_size: int
    threads: int


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    backbone: WeightType = "int4",
    tables: RowType = "int8",
    tokenizer: str | Path | None = None,
    head: WeightType | None = None,
    block_size: int = 32,
    group_size: int | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Bundle:
    """Export a checkpoint of the public STEM trainer to a bundle in the folder `out`.

    backbone: "int4", "int8" or "fp32" matrices in the layers.
    tables: "int8", "int4", "fp16" or "fp32" rows.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    head: type of embedding and head. Default: "int8", or "fp32" with an fp32 backbone.
    block_size, group_size: values that share a scale in the backbone and in the tables. Default:
        32 in the backbone; in the tables 128 for int8 and 32 for int4.
    force: replace an existing bundle; it stays whole until the new one is.
    progress: show a progress bar on stderr. Default: if that is a terminal.

    Raises CheckpointError, ExportError; then nothing has changed on disk.
    """
    options = _check_options(backbone, tables, head, block_size, group_size, threads)
    source = read_checkpoint(checkpoint)
    converted = _tokenizer(source, tokenizer)
    source = replace(source, config=_with_special_tokens(source, converted))
    config, out = source.config, Path(out)
    layout = _layout(source, options)
    total = 4 * (config.backbone_parameters + config.table_parameters)  # read as float32
    with publish(out, force=force) as folder, Progress(total, "exporting", progress) as bar:
        meter = ErrorMeter()
        files = _write_tokenizer(folder, converted)
        files |= _write_backbone(folder, source, layout, options, meter, bar)
        grid = make_grid(folder / TABLES, layout)
        files |= write_tables(grid, source.tables, meter, options.threads, bar.advance)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            model=config,
            backbone=options.backbone,
            tables=layout,
            files={path.relative_to(folder).as_posix(): entry for path, entry in files.items()},
            report=_report(source, files, meter),
        )
        bar.describe("comparing with the checkpoint")
        manifest = _compare(folder, source, manifest, options.threads)
        write_file(folder / MANIFEST, encode_manifest(manifest))
    return open_bundle(out)


def _check_options(
    backbone: WeightType,
    tables: RowType,
    head: WeightType | None,
    block_size: int,
    group_size: int | None,
    threads: int | None,
) -> _Options:
    head = head or ("fp32" if backbone == "fp32" else "int8")
    known = (
        ("backbone", backbone, WEIGHT_BITS),
        ("head", head, WEIGHT_BITS),
        ("tables", tables, ROW_BITS),
    )
    for name, value, choices in known:
        if value not in choices:
            raise ExportError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
    if group_size is None:
        group_size = 32 if tables == "int4" else 128
    for name, size in (("block_size", block_size), ("group_size", group_size)):
        if size not in (16, 32, 64, 128, 256):
            raise ExportError(f"{name} is {size}; expected 16, 32, 64, 128 or 256")
    if threads is not None and threads < 1:
        raise ExportError(f"threads is {threads}; expected at least 1")
    format = BackboneFormat(weights=backbone, head=head, block_size=block_size)
    return _Options(format, tables, group_size, threads or os.cpu_count() or 1)


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


def _layout(source: Checkpoint, options: _Options) -> RecordLayout:
    config = source.config
    try:
        return make_layout(
            config.vocab_size, config.stem_layers, config.d_ff, options.tables, options.group_size
        )
    except ValueError as error:
        raise ExportError(f"{source.path}: {options.tables} tables do not fit: {error}") from error


def _write_tokenizer(folder: Path, converted: ExportedTokenizer) -> dict[Path, FileEntry]:
    config = msgspec.json.format(msgspec.json.encode(converted.config, order="sorted"), indent=1)
    contents = {TOKENIZER: converted.json.encode(), TOKENIZER_CONFIG: config + b"\n"}
    return {folder / name: write_file(folder / name, data) for name, data in contents.items()}


def _write_backbone(
    folder: Path,
    source: Checkpoint,
    layout: RecordLayout,
    options: _Options,
    meter: ErrorMeter,
    bar: Progress,
) -> dict[Path, FileEntry]:
    path, data_path = folder / BACKBONE, folder / BACKBONE_DATA
    with BundleFile(data_path) as data:
        graph = Graph(data, BACKBONE_DATA)
        BackboneBuilder(
            graph, source.config, layout, options.backbone, source.backbone, meter, bar.advance
        ).build()
    return {data_path: data.entry, path: write_file(path, graph.serialize())}


def _report(source: Checkpoint, files: dict[Path, FileEntry], meter: ErrorMeter) -> QualityReport:
    backbone = sum(entry.nbytes for path, entry in files.items() if BACKBONE in path.name)
    tables = sum(entry.nbytes for path, entry in files.items() if TABLES in path.parts)
    return QualityReport(
        checkpoint_nbytes=source.nbytes,
        backbone_nbytes=backbone,
        tables_nbytes=tables,
        errors=meter.errors(),
        probe_tokens=(),
        worst_logit_difference=0.0,
        greatest_logit=0.0,
        notes=source.notes,
    )


def _compare(folder: Path, source: Checkpoint, manifest: Manifest, threads: int) -> Manifest:
    """The manifest with the logit difference between the new bundle and its checkpoint."""
    write_draft = folder / MANIFEST
    write_file(write_draft, encode_manifest(manifest))
    try:
        report = compare_logits(folder, source, manifest.report, threads)
    finally:
        write_draft.unlink()
    return msgspec.structs.replace(manifest, report=report)
