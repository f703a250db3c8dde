"""The disk tier: records of tables that are far away, in a file of the user's cache folder.

Records that the row cache lacks are looked up here before they are fetched. It
sees only the misses of that cache. Its numbers of records, and how
often each was used, are saved beside its file now and then and at the end, so that the next run
starts with them. A model that runs at the same time reads from the file and adds nothing.

    slot: a record as the row store returns it, its number (uint32), crc32c of both (uint32)

Nothing in the file is trusted. Number and checksum must match, so a slot that was half written,
written by another process, or for another record counts as empty. So the file may be lost, old or
changed, as far as a crc32c shows; and losing power costs some records at most.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.lock import lock
from stem_edge.files.whole_file import write_whole
from stem_edge.numerics.quantize import I32, I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.records import READ_AT_ONCE, Flags, Records, RowCounters
from stem_edge.runtime.rows.slots import Slots
from stem_edge.system.memory import pages_to_fill
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import crc32c
from stem_edge.units import parse_size

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
        """Fill records [n] from slots [n] >= 0; return which slots hold the records of numbers [n]."""
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


TIER = "tier"  # folder in the user's cache folder
USUAL_NBYTES, SHARE_OF_FREE = 10**9, 0.1  # the least of the two
SAVE_SECONDS = 120.0  # between two savings of its map


class DiskTier(Records):
    """A row store over another that keeps up to `slots` (at least 1) records of it in a file.

    Threads may call it at once and take turns. path: of its file; its map is saved in a file of the
    same name with the suffix ".map". Raises OSError if the file cannot be made.
    """

    def __init__(self, store: Records, path: Path, slots: int) -> None:
        self.far, self._turn, self._map = store, threading.Lock(), path.with_suffix(".map")
        self.splits = False  # because it keeps whole records
        self.distant = store.distant
        self.layout, self.tokens, self.index = store.layout, store.tokens, store.index
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = TierFile(path, store.layout, min(slots, store.layout.records))
        self._cache = RowCache(self._file)
        self.slots = self._cache.slots
        self.hits = self.misses = 0  # records found here, and not, counted once per read
        self.bytes_read = 0  # from the file
        self._keeps, self._save_at = self._file.writable, time.monotonic() + SAVE_SECONDS
        self._resume()

    def counters(self) -> RowCounters:
        own = RowCounters(bytes_read=self.bytes_read, tier_hits=self.hits, tier_misses=self.misses)
        return self.far.counters() + own

    def read(self, numbers: I64, whole: Flags | None = None) -> U8:
        """Read as RowStore.read does, but always whole records.

        When it raises, the records kept here are still right.
        """
        with self._turn:
            self._cache.use(numbers)
            records = pages_to_fill((len(numbers), self.layout.record_nbytes))
            found = self._file.read(numbers, self._cache.slots_of(numbers), records)
            missing = np.flatnonzero(~found)
            self.hits, self.misses = self.hits + int(found.sum()), self.misses + len(missing)
            self.bytes_read += int(found.sum()) * self._file.slot_nbytes
            # In parts, because the memory plan does not count a second array of records.
            for at in range(0, len(missing), READ_AT_ONCE):
                piece = missing[at : at + READ_AT_ONCE]
                records[piece] = self.far.read(numbers[piece])
                self._keep(numbers[piece], records[piece])
            if time.monotonic() > self._save_at:
                self._save()
            return records

    def _keep(self, numbers: I64, records: U8) -> None:
        """Keep as many records as there are slots, the most used ones, while the disk takes them."""
        if not self._keeps:
            return
        new, first = np.unique(numbers, return_index=True)
        order = np.argsort(self._cache.counts[new], kind="stable")[-self.slots :]
        new, first = new[order], first[order]
        try:
            self._cache.install(new, self._file.seal(new, records[first]), new)
        except OSError as error:
            self._keeps = False
            warnings.warn(
                f"{self._file.path}: cannot keep more rows here ({error.strerror or error}); they are "
                "fetched each time. Free some space, or give a smaller disk_tier (--disk-tier)",
                RuntimeWarning,
                stacklevel=2,
            )

    def _resume(self) -> None:
        """Start with what an earlier run has kept; a damaged map is one that is not there."""
        records = self.layout.records
        nbytes = 8 * records + 4
        with contextlib.suppress(OSError):
            data = disk.read_file(self._map, nbytes)
            if len(data) == nbytes and crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"):
                slots = np.frombuffer(data, "<i4", records)
                self._cache.resume(slots, np.frombuffer(data, "<u4", records, 4 * records))

    def _save(self) -> None:
        """Save the file's map. Errors of the disk are ignored: the next run then starts empty."""
        self._save_at = time.monotonic() + SAVE_SECONDS
        if not self._file.writable:
            return
        slots = self._cache.slots_of(np.arange(self.layout.records)).astype("<i4")
        data = slots.tobytes() + self._cache.counts.astype("<u4").tobytes()
        with contextlib.suppress(OSError):
            write_whole(self._map, data + crc32c(data).to_bytes(4, "little"))

    def stop(self) -> None:
        self.far.stop()

    def close(self) -> None:
        """Save what it holds, and close file and store."""
        with self._turn:
            self._save()
            self._file.writable = False  # so that closing twice saves once
            self._file.close()
        self.far.close()


def tier_over(store: Records, root: Path, key: str, asked: int | str | None) -> Records:
    """Put a tier over a store, in the cache folder `root`; closes the store if that fails.

    asked: see tier_nbytes.
    """
    try:
        path = root / TIER / f"{key}.rows"
        return open_tier(store, path, tier_nbytes(asked, path, store.layout))
    except BaseException:
        store.close()
        raise


def open_tier(store: Records, path: Path, nbytes: int) -> Records:
    """Put a tier of `nbytes` bytes over a store; return the store itself if that is not possible."""
    slots = nbytes // file_slot_nbytes(store.layout)
    if slots < 1:
        return store
    try:
        return DiskTier(store, path, slots)
    except OSError as error:
        warnings.warn(
            f"{path}: cannot keep rows here ({error.strerror or error}); they are fetched each time. "
            "Give another cache_dir (--cache-dir), or disk_tier=0 (--disk-tier 0)",
            RuntimeWarning,
            stacklevel=2,
        )
        return store


def tier_nbytes(asked: int | str | None, path: Path, layout: RecordLayout) -> int:
    """Return the bytes of a tier in this file, no more than all records take.

    asked: a size, 0 for no tier, or None for the usual one. Raises InputError.
    """
    everything = layout.records * file_slot_nbytes(layout)
    if asked is not None:
        return min(parse_tier(asked), everything)
    folder = next(folder for folder in path.parents if folder.exists())
    free = shutil.disk_usage(folder).free
    with contextlib.suppress(OSError, AttributeError):  # Windows counts no blocks
        free += path.stat().st_blocks * 512  # what an earlier run took counts as free
    return min(USUAL_NBYTES, int(SHARE_OF_FREE * free), everything)


def parse_tier(asked: int | str) -> int:
    """Parse the size of a tier, which may be 0. Raises InputError."""
    if str(asked).strip() == "0":
        return 0
    try:
        return parse_size(asked)
    except InputError as error:
        raise InputError(
            f"disk_tier is {asked!r}; expected a size like 1GB, or 0 for none"
        ) from error
