"""What is computed here beside what is found in a bundle and on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from scale_tables import Table

from stem_edge.bundle.footprint import expected_footprint, footprint_of
from stem_edge.bundle.manifest import TABLES, open_bundle
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.store import TableFormat

RECORDS, ROUNDS = 64, 15  # of a read as of a batch of so many sequences


def check(bundle: Path, ids: I64) -> Table:
    """Sizes of a bundle as computed and as they are, and how fast its rows are taken from memory."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.backbone is None or manifest.table_format is None:
        raise InputError(f"{bundle}: expected a bundle for onnxruntime with tables")
    computed = expected_footprint(manifest.model, manifest.backbone, manifest.table_format)
    table = Table("", "computed", "found")
    found = footprint_of(manifest)
    files = {name: file.nbytes for name, file in manifest.files.items()}
    shards = sum(
        nbytes for name, nbytes in files.items() if name.startswith(TABLES) and "/c/" in name
    )
    table.add("backbone, bytes", computed.backbone_nbytes, found.backbone_nbytes)
    table.add("matrices for prompts, bytes", computed.prefill_nbytes, found.prefill_nbytes)
    table.add("tables, bytes", computed.tables_nbytes, shards)
    read, write = row_rates(opened.file(TABLES), manifest.table_format, ids)
    table.add("reading and checking records in the page cache, GB/s", "", read / 1e9)
    table.add("putting them into slots, GB/s", "", write / 1e9)
    table.add("both, GB/s", "", 1 / (1 / read + 1 / write) / 1e9)
    return table


def row_rates(root: Path, format: TableFormat, ids: I64) -> tuple[float, float]:
    """Return the bytes a second of reading records, and of writing them into slots."""
    wanted = np.unique(ids)[:RECORDS]
    slots = ArraySlots(format.tables, len(wanted))
    places = np.arange(len(wanted), dtype=np.intp)
    with open_store(root, format) as store:
        records = store.read(wanted)
        read = timed(lambda: store.read(wanted))
        write = timed(lambda: slots.write(places, records))
    return records.size / read, records.size / write


def timed(run: Callable[[], object]) -> float:
    """Return the median seconds of a run."""
    times = list[float]()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)
