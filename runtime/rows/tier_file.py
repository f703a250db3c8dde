"""The file of a disk tier: records in slots of a local file, each with its number and a crc32c.

    slot: a record as the row store returns it, its number (uint32), crc32c of both (uint32)

Nothing in it is trusted. A slot that was written half, by another process, or for another record is
told by number and checksum, and counts as empty. So the file may be lost, old or changed by anyone
who may write there, as far as a crc32c tells; and losing power costs some records at most.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stem_edge.files import disk
from stem_edge.files.lock import lock
from stem_edge.numerics.quantize import I32, I64, U8
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import crc32c

TAIL_NBYTES = 8  # of a slot: number and checksum


def file_slot_nbytes(layout: RecordLayout) -> int:
    """Bytes of a slot of the file."""
    return layout.record_nbytes + TAIL_NBYTES


class TierFile(Slots):
    """Slots in a file, which is made if it is not there. Raises OSError.

    If another process has the file, it can be read, but not written.
    """

    def __init__(self, path: Path, layout: RecordLayout, count: int) -> None:
        self.path, self.layout, self.count = path, layout, count
        self._file = disk.update(path)
        try:
            if locked := lock(self._file):
                disk.resize(self._file, count * self.slot_nbytes)
        except BaseException:
            disk.close(self._file)
            raise
        self.writable = locked

    @property
    def slot_nbytes(self) -> int:
        return file_slot_nbytes(self.layout)

    def seal(self, numbers: I64, records: U8) -> U8:
        """Return the bytes of slots [n, slot_nbytes] with these records [n]."""
        sealed = np.empty((len(records), self.slot_nbytes), np.uint8)
        sealed[:, :-TAIL_NBYTES] = records
        sealed[:, -TAIL_NBYTES:-4] = numbers.astype("<u4")[:, None].view(np.uint8)
        sums = np.array([crc32c(slot[:-4]) for slot in sealed], "<u4")
        sealed[:, -4:] = sums[:, None].view(np.uint8)
        return sealed

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        """Put sealed records [n] into slots [n]. Raises OSError."""
        for slot, sealed in zip(slots.tolist(), records, strict=True):
            disk.write_at(self._file, sealed.data, slot * self.slot_nbytes)

    def read(self, numbers: I64, slots: I32, records: U8) -> npt.NDArray[np.bool_]:
        """Fill records [n] from slots [n], where not negative; return which are those of numbers [n]."""
        nbytes, wanted = self.slot_nbytes, [slot for slot in slots.tolist() if slot >= 0]
        if len(wanted) > 1 and hasattr(os, "posix_fadvise"):
            for slot in wanted:
                with contextlib.suppress(OSError):  # some file systems take no advice
                    at = slot * nbytes
                    os.posix_fadvise(self._file, at, nbytes, os.POSIX_FADV_WILLNEED)
        buffer, found = np.empty(nbytes, np.uint8), np.zeros(len(numbers), np.bool_)
        for place in np.flatnonzero(slots >= 0).tolist():
            with contextlib.suppress(OSError):  # a bad block is a record that is not there
                read = disk.fill(self._file, buffer.data, int(slots[place]) * nbytes)
                number, checksum = buffer[-TAIL_NBYTES:].view("<u4").tolist()
                found[place] = (
                    read == nbytes and number == numbers[place] and checksum == crc32c(buffer[:-4])
                )
                records[place] = buffer[:-TAIL_NBYTES]
        return found

    def close(self) -> None:
        """Close the file, and leave it to other processes."""
        if self._file >= 0:
            file, self._file = self._file, -1
            disk.close(file)
