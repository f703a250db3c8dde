"""The backbone for ggml: one GGUF file (stem_edge.gguf_schema) with the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from stem_edge import gguf_schema
from stem_edge.bundle import GGUF, FileEntry, tables_hash
from stem_edge.export.calibration import sequences
from stem_edge.export.gguf_tokenizer import tokenizer_metadata
from stem_edge.export.gguf_writer import GgufValue, TensorSource, write_gguf
from stem_edge.export.importance import importance_vectors
from stem_edge.export.job import Advance, Job, Tell, Work
from stem_edge.export.report import ErrorMeter
from stem_edge.formats import GgufFormat, GgufType
from stem_edge.ggml import Ggml
from stem_edge.quantize import F32

# llama.cpp's numbers of its mixtures: general.file_type.
FILE_TYPES: dict[GgufType, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q8_0": 7,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
}
STACKED = {"wq": "qkv", "wk": "qkv", "wv": "qkv"}  # as the quality report names matrices


class GgufBackbone:
    """Writes backbone.gguf of one export.

    written: files of the steps before, the table store among them.
    """

    def __init__(
        self,
        job: Job,
        format: GgufFormat,
        ggml: Ggml,
        written: Callable[[], Mapping[str, FileEntry]],
        tell: Tell,
    ) -> None:
        self._job, self._format, self._ggml = job, format, ggml
        self._written, self._tell = written, tell

    def steps(self) -> list[tuple[str, Work]]:
        """Name and work of the one step, which comes after those of the tables."""
        return [("backbone", self._backbone)]

    def _backbone(self, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
        path = self._job.folder / GGUF
        tensors = self._tensors(self._importance())
        self._tell("exporting")
        entry = write_gguf(
            path,
            self._ggml,
            gguf_schema.ARCHITECTURE,
            self._metadata(),
            tensors,
            threads=self._job.options.cpus,
            meter=meter,
            advance=advance,
        )
        return {path: entry}

    def _importance(self) -> Mapping[str, F32]:
        job = self._job
        if not self._format.importance:
            return {}
        longest = job.source.config.max_context
        ids = sequences(job.text_ids, job.options.text_tokens, longest)
        return importance_vectors(job.source, ids, self._tell)

    def _tensors(self, importance: Mapping[str, F32]) -> list[TensorSource]:
        config, backbone = self._job.source.config, self._job.source.backbone
        types = gguf_schema.tensor_types(config, self._format.weights)
        return [
            TensorSource(
                gguf_schema.gguf_name(name),
                backbone[name],
                types[name],
                kind=_kind(name),
                importance=importance.get(name),
            )
            for name in config.backbone_shapes()
        ]

    def _metadata(self) -> dict[str, GgufValue]:
        source, config = self._job.source, self._job.source.config
        values: dict[str, GgufValue] = {
            "general.name": source.path.resolve().name or gguf_schema.ARCHITECTURE,
            "general.file_type": FILE_TYPES[self._format.weights],
            "general.quantization_version": gguf_schema.QUANTIZATION_VERSION,
            "general.alignment": gguf_schema.ALIGNMENT,
            **gguf_schema.model_metadata(config),
        }
        if config.stem_layers:
            values[gguf_schema.TABLES_KEY] = tables_hash(self._written())
        return values | tokenizer_metadata(self._job.converted, config.vocab_size)


def _kind(name: str) -> str:
    part = name.rsplit(".", 1)[-1]
    return STACKED.get(part, part)
