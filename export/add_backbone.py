"""Add a backbone, or an assistant, to an existing bundle and keep its other files.

The two backbones share tables and tokenizer, so the bundle must come from the same checkpoint. It
does not name its checkpoint, so the model, the tokenizer and rows from all over the tables are
compared with the checkpoint's, quantized as they would be now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from stem_edge.bundle.manifest import MANIFEST, TABLES, TOKENIZER, FileEntry, encode_manifest
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.table_arrays import open_tables
from stem_edge.errors import ExportError
from stem_edge.export.backbone.assistant import AssistantPart
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.files import BundleFile, write_file
from stem_edge.export.job.job import Advance
from stem_edge.export.job.journal import Journal
from stem_edge.export.job.publish import publish
from stem_edge.export.job.table_plan import scaling_of
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.files import disk
from stem_edge.files.plain_files import read_at
from stem_edge.files.trees import make_folders
from stem_edge.graph.formats import ASSISTANT_DATA
from stem_edge.numerics.quantize import F32
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import open_table_store

TOKENS = 32  # rows of these many tokens are compared
# Most values that are compared, because an expert is large; two tokens always are.
VALUES = 1 << 26
# Mean error of a stored row / mean error of the same row quantized now. Above 1, because other
# versions and processors may find other codes; another checkpoint's rows are tens of times off.
MORE = 1.5
LEAST = 1e-5  # mean error, over the row's greatest value, that is only rounding
COPY_NBYTES = 1 << 22
ADVICE = (
    "give the checkpoint that the bundle was made of, or export to another folder without --add"
)


def check_base(out: Path, *, force: bool) -> None:
    """Raise ExportError if there is no bundle to add to, or if force is set, too."""
    if force:
        raise ExportError(
            f"{out}: add keeps what is in the bundle, force replaces it; leave one of them out"
        )
    if not (out / MANIFEST).is_file():
        raise ExportError(
            f"{out}: is not a bundle, so no backbone can be added to it; leave out --add to export a "
            "whole one"
        )


def open_base(out: Path, source: Checkpoint, converted: ExportedTokenizer) -> Bundle:
    """Open the bundle in `out`. Raises BundleError, and ExportError if it has another checkpoint."""
    base = open_bundle(out)
    model = base.manifest.model
    pairs = {f: (getattr(model, f), getattr(source.config, f)) for f in model.__struct_fields__}
    if wrong := [f"{f} is {a}, not {b}" for f, (a, b) in pairs.items() if a != b]:
        raise ExportError(
            f"{out}: is of another model than {source.path}: {'; '.join(wrong)}; {ADVICE}"
        )
    expected = converted.json.encode()
    if disk.read_file(base.file(TOKENIZER), len(expected)) != expected:
        raise ExportError(
            f"{base.file(TOKENIZER)}: is not the tokenizer of {source.path}; give the one that the "
            "bundle was made with, with --tokenizer FILE, or export to another folder"
        )
    _check_rows(base, source)
    return base


def _check_rows(base: Bundle, source: Checkpoint) -> None:
    config = source.config
    if base.manifest.table_format is None:
        return
    store = open_table_store(base.file(TABLES))
    count = min(TOKENS, max(2, VALUES // config.record_values))
    with open_tables(base.path) as tables:
        for token in np.unique(np.linspace(0, config.table_ids - 1, count).astype(int)).tolist():
            record = token if store.index is None else int(store.index[token])
            layout = store.grids[record >= store.grids[0].layout.records].layout
            rows = [source.rows[layer].rows(token, token + 1) for layer in layout.layers]
            for layer, row, lost in zip(layout.layers, rows, _losses(layout, rows), strict=True):
                found = _mean_error(tables[token, layer], row[0])
                if not found <= MORE * lost + LEAST:
                    raise ExportError(
                        f"{base.path}: its tables are not those of {source.path}: the row of token "
                        f"{token} in layer {layer} is off by {found:.2%} of its greatest value on "
                        f"average, but quantizing it costs only {lost:.2%}; {ADVICE}"
                    )


def _losses(layout: RecordLayout, rows: list[F32]) -> list[float]:
    """Return the mean error of each layer's row [1, width] when it is stored now."""
    packed = pack_records(layout, rows, scaling_of(layout))
    return [_mean_error(layout.unpack(packed, at)[0], row[0]) for at, row in enumerate(rows)]


def _mean_error(stored: F32, original: F32) -> float:
    """Return the mean error as a share of the row's greatest value."""
    return float(np.abs(stored - original).mean() / (np.abs(original).max() or 1))


def add_assistant(
    out: Path,
    source: Checkpoint,
    converted: ExportedTokenizer,
    part: AssistantPart,
    threads: int,
    files: object,
) -> None:
    """Put an assistant into the bundle in `out`, and keep its other files.

    files: of the assistant, as Sources.used returns. Raises ExportError.
    """
    with publish(out, force=True) as work:
        base = open_base(out, source, converted)
        if base.manifest.backbone is None:
            raise ExportError(
                f"{out}: has no backbone for onnxruntime, which an assistant needs; add that first: --add "
                "without --assistant"
            )
        described = encode_manifest(base.manifest), part.described, files
        journal = Journal(work.path, hashlib.sha256(repr(described).encode()).hexdigest())
        journal.run("kept", partial(keep_files, base, (ASSISTANT_DATA,), work.path), _ignore)
        journal.run("assistant", partial(part.write, work.path, threads), _ignore)
        manifest = replace(base.manifest, assistant=part.described, files=journal.files())
        write_file(work.path / MANIFEST, encode_manifest(manifest))
        journal.close()


def _ignore(_: int) -> None:
    """Show no progress."""


def keep_files(
    base: Bundle, without: Collection[str], folder: Path, meter: ErrorMeter, advance: Advance
) -> dict[Path, FileEntry]:
    """Link or copy all files of the bundle but some into another folder."""
    files = base.manifest.files
    kept = {folder / n: (base.file(n), e) for n, e in files.items() if n not in without}
    for path, (source, entry) in kept.items():
        make_folders(path.parent)
        try:
            disk.link(source, path)
        except OSError:  # FAT, for example, cannot link
            _copy(source, path, entry)
    return {path: entry for path, (_, entry) in kept.items()}


def _copy(source: Path, target: Path, entry: FileEntry) -> None:
    with disk.opened(source) as file, BundleFile(target) as copy:
        for at in range(0, entry.nbytes, COPY_NBYTES):
            copy.write(bytes(read_at(file, COPY_NBYTES, at)))
    if copy.entry != entry:
        raise ExportError(
            f"{source}: sha256 is {copy.entry.sha256}, expected {entry.sha256}; the file is damaged: "
            "copy the bundle again, or export it without --add"
        )
