"""Whether there is room for a bundle: known before the first byte of it is written."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stem_edge.errors import ExportError
from stem_edge.export.files import free_nbytes
from stem_edge.export.job import Job
from stem_edge.export.journal import Journal
from stem_edge.footprint import Footprint, expected_footprint, gguf_footprint
from stem_edge.formats import GgufFormat
from stem_edge.units import format_size


def check_space(out: Path, job: Job, journal: Journal) -> int:
    """Bytes that this export has still to write, tokenizer and descriptions not counted.

    Raises ExportError when there is no room for them.
    """
    done = sum(entry.nbytes for entry in journal.files().values())
    left = max(0, _bundle_nbytes(job) - done)
    check_free(out, left)
    return left


def check_free(out: Path, needed: int) -> None:
    """Raises ExportError unless so many bytes can be written beside `out`."""
    free = free_nbytes(out)
    if free < needed:
        raise ExportError(
            f"{out}: not enough room on its disk: {format_size(needed, up=True)} are needed, "
            f"{format_size(free)} are free; free some space or choose another disk"
        )


def _bundle_nbytes(job: Job) -> int:
    footprint = _footprint(job)
    if job.base is not None:  # whose files are linked
        return footprint.backbone_nbytes + footprint.prefill_nbytes
    return footprint.flash_nbytes


def _footprint(job: Job) -> Footprint:
    tables, format = job.tables.format if job.tables else None, job.options.format
    if isinstance(format, GgufFormat):
        return gguf_footprint(job.source.config, format, tables)
    format = msgspec.structs.replace(format, prefill=job.options.prefill)
    return expected_footprint(job.source.config, format, tables)
