"""Check of a bundle's tables from end to end, which opening leaves to the first use of a record.

NaN and infinity can carry a valid checksum, so values and scales are checked, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BundleError
from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.codecs import CODECS
from stem_edge.tables.rows import RecordLayout

PIECE_NBYTES = 8 << 20  # read at a time; a record may be larger


def check_tables(bundle: Bundle, progress: Callable[[int], object] = lambda nbytes: None) -> None:
    """Read every record; check that its checksum is right and that all its values are finite.

    `progress` is called with the number of bytes just checked. Raises BundleError naming shard
    and record. A dense model has nothing to check.
    """
    format = bundle.manifest.table_format
    if format is None:
        return
    with open_store(bundle.file(TABLES), format) as store:
        count, nbytes = store.layout.records, format.mean_record_nbytes
        step = max(1, PIECE_NBYTES // store.layout.record_nbytes)
        for start in range(0, count, step):
            numbers = np.arange(start, min(start + step, count))
            if found := _first_infinite(store.layout, store.read(numbers)):
                where = store.where(start + found[0])
                raise BundleError(f"{where}: {found[1]}; export the bundle again")
            progress(len(numbers) * nbytes)


def _first_infinite(layout: RecordLayout, records: U8) -> tuple[int, str] | None:
    """Find the first of records [n, stride] with a number that is NaN or too large.

    Returns the record's place and what is wrong.
    """
    codes, scales = layout.split(records)
    unpack = CODECS[layout.row_type].unpack
    numbers, what = (scales, "scale") if layout.quantized else (unpack(codes), "value")
    # A scale must stay finite when it is multiplied by a code, which is up to half the range.
    largest = np.finfo(np.float32).max / (1 << layout.bits - 1 if layout.quantized else 1)
    floats: F32 = np.asarray(numbers, np.float32)
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(floats) <= np.float32(largest))
    if not bad.any():
        return None
    place, index, column = (int(at[0]) for at in np.nonzero(bad))
    found = floats[place, index, column]
    return place, f"{what} {column} of layer {layout.layers[index]} is {found}, not finite"
