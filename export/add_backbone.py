"""A backbone for another engine in a bundle that exists: everything else stays as it is.

The two backbones share tables and tokenizer, so the bundle must be of the same checkpoint. Nothing
in it names its checkpoint, so they are compared: the model, the tokenizer, and rows from all over
the tables with what this checkpoint's rows become.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stem_edge.bundle.manifest import (
    BACKBONE_FILES,
    MANIFEST,
    TABLES,
    TOKENIZER,
    Bundle,
    FileEntry,
    open_bundle,
)
from stem_edge.bundle.tables import open_tables
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.files import BundleFile
from stem_edge.export.job.job import Advance
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.files import disk
from stem_edge.files.plain_files import read_at
from stem_edge.graph.formats import EngineName
from stem_edge.numerics.quantize import F32
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import open_table_store

TOKENS = 32  # whose rows are compared
VALUES = 1 << 26  # and how many values, at most; but always two tokens: experts are large
# Mean error of a stored row, over that of the same row quantized now. Other versions and processors
# may find somewhat other codes; rows of another checkpoint are off by tens of times as much.
MORE = 1.5
LEAST = 1e-5  # mean error, of the row's greatest value, that means nothing
COPY_NBYTES = 1 << 22
ADVICE = (
    "give the checkpoint that the bundle was made of, or export to another folder without --add"
)


def check_base(out: Path, *, force: bool) -> None:
    """Raises ExportError if there is no bundle that something can be added to, or with force."""
    if force:
        raise ExportError(
            f"{out}: add keeps what is in the bundle, force replaces it; leave one of them out"
        )
    if not (out / MANIFEST).is_file():
        raise ExportError(
            f"{out}: there is no bundle that a backbone can be added to; leave --add out to export "
            "a whole one"
        )


def open_base(out: Path, source: Checkpoint, converted: ExportedTokenizer) -> Bundle:
    """The bundle in `out`. Raises ExportError if it is of another checkpoint, BundleError."""
    base = open_bundle(out)
    model = base.manifest.model
    pairs = {f: (getattr(model, f), getattr(source.config, f)) for f in model.__struct_fields__}
    if wrong := [f"{f} is {a}, not {b}" for f, (a, b) in pairs.items() if a != b]:
        raise ExportError(
            f"{out}: of another model than {source.path}: {'; '.join(wrong)}; {ADVICE}"
        )
    expected = converted.json.encode()
    if disk.read_file(base.file(TOKENIZER), len(expected)) != expected:
        raise ExportError(
            f"{base.file(TOKENIZER)}: another tokenizer than that of {source.path}; give the one "
            "that the bundle was made with: --tokenizer FILE, or export to another folder"
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
        for token in np.unique(np.linspace(0, config.vocab_size - 1, count).astype(int)).tolist():
            record = token if store.index is None else int(store.index[token])
            layout = store.grids[record >= store.format.frequent].layout
            rows = [source.rows[layer].rows(token, token + 1) for layer in layout.layers]
            for layer, row, lost in zip(layout.layers, rows, _losses(layout, rows), strict=True):
                found = _mean_error(tables[token, layer], row[0])
                if not found <= MORE * lost + LEAST:
                    raise ExportError(
                        f"{base.path}: its tables are not those of {source.path}: the row of token "
                        f"{token} in layer {layer} is off by {found:.2%} of its greatest value on "
                        f"average, and quantizing it costs {lost:.2%}; {ADVICE}"
                    )


def _losses(layout: RecordLayout, rows: list[F32]) -> list[float]:
    """Mean error of each layer's row [1, width] when it is stored now."""
    packed = layout.pack(rows, search=layout.row_type == "int4")
    return [_mean_error(layout.unpack(packed, at)[0], row[0]) for at, row in enumerate(rows)]


def _mean_error(stored: F32, original: F32) -> float:
    """Of the row's greatest value."""
    return float(np.abs(stored - original).mean() / (np.abs(original).max() or 1))


def keep_files(
    base: Bundle, engine: EngineName, folder: Path, meter: ErrorMeter, advance: Advance
) -> dict[Path, FileEntry]:
    """All files of the bundle but the engine's backbone in another folder, as hard links if they
    can be."""
    files = base.manifest.files
    kept = {
        folder / n: (base.file(n), e) for n, e in files.items() if n not in BACKBONE_FILES[engine]
    }
    for path, (source, entry) in kept.items():
        disk.make_folders(path.parent)
        try:
            disk.link(source, path)
        except OSError:
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
