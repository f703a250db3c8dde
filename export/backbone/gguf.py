"""Backbone for ggml: one GGUF file (stem_edge.ggml.gguf_schema) with the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from stem_edge.bundle.checksums import tables_hash
from stem_edge.bundle.manifest import GGUF, FileEntry
from stem_edge.export.backbone.gguf_tokenizer import tokenizer_metadata
from stem_edge.export.backbone.gguf_values import TensorSource
from stem_edge.export.backbone.gguf_writer import GgufValue, write_gguf
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.job import Advance, Job, Tell
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.quantization.calibration import sequences
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.quantization.hidden_states import importance_vectors
from stem_edge.ggml import gguf_schema
from stem_edge.graph.formats import GgufFormat, GgufType, OwnTypes
from stem_edge.hub.names import shown_name
from stem_edge.numerics.quantize import F32, I64

# Values of general.file_type: llama.cpp's numbers of its mixtures.
FILE_TYPES: dict[GgufType, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q8_0": 7,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
}
MIXED = 1024  # llama.cpp's number for a guess from the tensors themselves
KINDS = {"wq": "qkv", "wk": "qkv", "wv": "qkv"}  # names in the quality report


def write_backbone(
    job: Job,
    format: GgufFormat,
    written: Callable[[], Mapping[str, FileEntry]],
    tell: Tell,
    meter: ErrorMeter,
    advance: Advance,
) -> dict[Path, FileEntry]:
    """Write backbone.gguf; written: returns the files of earlier steps, as the table store's."""
    if job.ggml is None:
        raise ValueError("an export for ggml needs the library")
    source, config, weights = job.source, job.source.config, format.weights
    importance: Mapping[str, F32] = {}
    if format.importance:
        importance = importance_by_text(source, job.text_ids, job.options, tell)
    types = gguf_schema.tensor_types(config, weights)
    tensors = [
        TensorSource(
            gguf_schema.gguf_name(name),
            source.backbone[name],
            types[name],
            KINDS.get(part := name.rsplit(".", 1)[-1], part),
            importance.get(name),
        )
        for name in config.backbone_shapes()
    ]
    values = _metadata(source, weights)
    if config.stem_layers:
        values[gguf_schema.TABLES_KEY] = tables_hash(written())
    values |= tokenizer_metadata(job.converted, config.vocab_size)
    threads, path = job.options.cpus, job.folder / GGUF
    return {path: write_gguf(path, job.ggml, values, tensors, threads, meter, advance)}


def _metadata(source: Checkpoint, weights: GgufType | OwnTypes) -> dict[str, GgufValue]:
    return {
        "general.architecture": gguf_schema.ARCHITECTURE,
        "general.name": shown_name(source.path.resolve()) or gguf_schema.ARCHITECTURE,
        "general.file_type": FILE_TYPES[weights] if isinstance(weights, str) else MIXED,
        "general.quantization_version": gguf_schema.QUANTIZATION_VERSION,
        "general.alignment": gguf_schema.ALIGNMENT,
        **gguf_schema.model_metadata(source.config),
    }


def importance_by_text(
    source: Checkpoint, text_ids: I64, options: ExportOptions, tell: Tell
) -> dict[str, F32]:
    """Return importance_vectors of a calibration text; none if the types ignore them."""
    if not (isinstance(options.format, GgufFormat) and options.format.importance):
        return {}
    ids = sequences(text_ids, options.text_tokens, source.config.max_context)
    vectors = importance_vectors(source, ids, tell)
    tell("exporting")
    return vectors
