"""Report of a bundle's contents, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from stem_edge.bundle.manifest import Manifest, QualityReport
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.ggml.gguf_schema import tensor_types
from stem_edge.graph.formats import (
    ASSISTANT_DATA,
    GGUF,
    PREFILL_DATA,
    VOCABULARY_KINDS,
    BackboneFormat,
)
from stem_edge.graph.special.assistant import scored
from stem_edge.runtime.rows.remote import printable_url
from stem_edge.shown import format_size, printable
from stem_edge.tables.rows import RecordLayout


def bundle_figures(bundle: Bundle) -> dict[str, object]:
    manifest = bundle.manifest
    model, tables = manifest.model, manifest.stored
    derived: dict[str, object] = {
        "parameters": model.backbone_parameters + model.table_parameters,
        "parameters_active": model.active_parameters,
        "parameters_tables": model.table_parameters,
        "record_nbytes": tables.record_nbytes if tables else 0,
        "flash_nbytes": manifest.report.tables_nbytes,
        "backbone_nbytes": manifest.report.backbone_nbytes,
    }
    where = {} if bundle.tables is None else {"tables_url": printable_url(bundle.tables)}
    return derived | where | dict(msgspec.to_builtins(manifest))


def bundle_table(bundle: Bundle) -> str:
    lines = [str(bundle.path)]
    if bundle.tables is not None:
        lines.append(
            f"its tables' shards are at {printable_url(bundle.tables)}, and were not looked at"
        )
    for part in (_model, _storage, _quality):
        rows = part(bundle.manifest)
        lines += ["", *(f"{name:<22}{value}".rstrip() for name, value in rows)]
    return "\n".join(lines)


Rows = Iterator[tuple[str, str]]


def _model(manifest: Manifest) -> Rows:
    model = manifest.model
    layers = ", ".join(map(str, model.stem_layers)) or "none, a dense model"
    total = model.backbone_parameters + model.table_parameters
    yield "architecture", f"{model.n_layers} layers, {model.dim} wide, d_ff {_sizes(model, 'd_ff')}"
    heads = f"{model.n_heads} heads, {model.n_kv_heads} for keys and values"
    yield "attention", f"{heads}, {_sizes(model, 'head_dim')} wide"
    with_rows = "layers with rows" if model.ple_width or model.ngram_order else "STEM layers"
    yield with_rows, f"{len(model.stem_layers)} of {model.n_layers}: {layers}"
    head = "tied to the embedding" if model.tied_head else "separate"
    yield "vocabulary", f"{model.vocab_size:,} tokens, head {head}"
    yield "context", f"{model.max_context:,} tokens"
    yield "parameters", f"{total:,}"
    yield "  in tables", f"{model.table_parameters:,} ({model.table_parameters / total:.0%})"
    yield "  active per token", f"{model.active_parameters:,}"


def _sizes(model: ModelConfig, name: str) -> str:
    """Return the distinct values that a field has in the layers, as text like "256 or 512"."""
    return " or ".join(map(str, sorted({getattr(layer, name) for layer in model.layers})))


def _storage(manifest: Manifest) -> Rows:
    backbone, gguf, tables = manifest.backbone, manifest.gguf, manifest.stored
    if backbone is not None:
        nbytes = format_size(manifest.report.backbone_nbytes)
        yield "backbone", f"{nbytes}, {_weights(backbone)}"
        types = dict.fromkeys(map(backbone.type_of, VOCABULARY_KINDS))
        yield "  embedding, head", " and ".join(types)
        prefill = "none"
        if backbone.prefill:
            nbytes = format_size(manifest.files[PREFILL_DATA].nbytes)
            prefill = f"including {nbytes} of int8 weights for prompts"
        yield "  prefill graph", prefill
    if (assistant := manifest.assistant) is not None:
        nbytes, own = format_size(manifest.files[ASSISTANT_DATA].nbytes), assistant.model
        scores = f"scores {scored(assistant):,} of {own.vocab_size:,} tokens"
        yield (
            "assistant",
            f"{nbytes}, {own.borrowed_kv_layers} layers, {assistant.format.name}, {scores}",
        )
    if gguf is not None:
        weighted = ", channels weighted by a text" if gguf.importance else ""
        nbytes = format_size(manifest.files[GGUF].nbytes)
        yield "backbone for ggml", f"{nbytes}, {gguf.name}{weighted}"
        # Count the types, because the name of a mixture hides the matrices that no K-quant fits.
        chosen = tensor_types(manifest.model, gguf.weights)
        shapes = manifest.model.backbone_shapes().items()
        counts = Counter(chosen[name].name for name, shape in shapes if len(shape) == 2)
        stored = [f"{name} in {count} of {counts.total()}" for name, count in counts.most_common()]
        yield "  types of matrices", ", ".join(stored)
    if tables is not None:
        nbytes = format_size(manifest.report.tables_nbytes)
        yield "tables on flash", f"{nbytes}, {_row_types(tables, manifest.rare_tables)}"
        record = format_size(tables.record_nbytes)
        yield "  one record", f"{record}, the most that a token reads"


def _weights(backbone: BackboneFormat) -> str:
    """Describe how the layers' matrices are stored: types, block size, and quantizer (like GPTQ)."""
    types: list[str] = [backbone.weights]
    types += [f"{k} {t}" for k, t in backbone.kinds.items() if k not in VOCABULARY_KINDS]
    named = Counter(backbone.matrices.values())
    types += [f"{count} matrices {each}" for each, count in named.items()]
    quantized = backbone.types() != {"fp32"}
    details = ", ".join(types) + (f" in blocks of {backbone.block_size}" if quantized else "")
    details += ", asymmetric" if backbone.asymmetric else ""
    details += ", with offsets" if backbone.offsets else ""
    return details + (f", by {backbone.quantizer}" if backbone.quantizer != "rtn" else "")


def _row_types(tables: RecordLayout, rare: RecordLayout | None) -> str:
    groups = f" in groups of {tables.group_size}" if tables.quantized else ""
    if rare is None:
        return f"{tables.row_type}{groups}"
    usual = f"{tables.row_type} of {tables.records - rare.records:,} records{groups}"
    return f"{usual}, {rare.row_type} of {rare.records:,}"


def _quality(manifest: Manifest) -> Rows:
    report = manifest.report
    if report.probe_tokens:
        yield from _comparison(report)
    else:
        yield "types of the file", "kept as stored, so nothing was compared with the checkpoint"
    yield from (("note", printable(note)) for note in report.notes)


def _comparison(report: QualityReport) -> Rows:
    divergence = f"{report.divergence:g} nats from the checkpoint, mean"
    if report.divergence_99 is not None:
        divergence += f"; 99th percentile {report.divergence_99:g}"
    yield "divergence", divergence
    if report.prefill_divergence is not None:
        yield "  of prefill graph", f"{report.prefill_divergence:g} nats"
    if report.agreement is not None:
        count = len(report.probe_tokens)
        yield "same best token", f"at {report.agreement:.1%} of {count} positions"
