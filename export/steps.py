"""What an export writes, step by step: tokenizer, backbone, table store, or a backbone alone.

Each step is of some whole files, so that an interrupted export goes on after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from stem_edge.bundle import TABLES, TOKEN_COUNTS, TOKENIZER, TOKENIZER_CONFIG, FileEntry
from stem_edge.export.adding import keep_files
from stem_edge.export.files import write_file
from stem_edge.export.gguf_backbone import GgufBackbone
from stem_edge.export.job import Advance, Job, Tell, Work
from stem_edge.export.onnx_backbone import OnnxBackbone
from stem_edge.export.report import ErrorMeter
from stem_edge.export.tables import TableWriter
from stem_edge.formats import GgufFormat
from stem_edge.quantize import F32
from stem_edge.token_counts import encode_counts


def all_steps(
    job: Job, peaks: dict[str, F32], written: Callable[[], Mapping[str, FileEntry]], tell: Tell
) -> list[tuple[str, Work]]:
    """Name and work of each step: work(meter, advance) writes and returns files.

    peaks: of OnnxBackbone; written: files of the steps that are done.
    """
    before: list[tuple[str, Work]] = [("tokenizer", partial(_tokenizer, job))]
    after: list[tuple[str, Work]] = []
    if job.base is not None:
        before = [("kept", partial(keep_files, job.base, job.options.runs_on, job.folder))]
    elif job.tables is not None:
        tables, threads = job.source.tables, job.options.cpus
        after = TableWriter(job.folder / TABLES, job.tables, tables, threads).steps()
    format = job.options.format
    if not isinstance(format, GgufFormat):
        return before + OnnxBackbone(job, peaks, tell).steps() + after
    if job.ggml is None:
        raise ValueError("an export for ggml needs the library")
    return before + after + GgufBackbone(job, format, job.ggml, written, tell).steps()


def _tokenizer(job: Job, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
    converted = job.converted
    config = msgspec.json.encode(converted.config, order="sorted")
    contents = {
        TOKENIZER: converted.json.encode(),
        TOKENIZER_CONFIG: msgspec.json.format(config, indent=1) + b"\n",
    }
    if len(job.text_ids):
        contents[TOKEN_COUNTS] = encode_counts(job.counts)
    paths = {job.folder / name: data for name, data in contents.items()}
    return {path: write_file(path, data) for path, data in paths.items()}
