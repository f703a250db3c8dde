"""Computes the sha256 of files, reading them piece by piece."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.plain_files import check_status, damaged, open_plain, read_at, remedy_for

HASH_PIECE_NBYTES = 1 << 22


def read_piece(path: Path, descriptor: int, nbytes: int, offset: int) -> bytearray:
    """Read exactly `nbytes` bytes from `offset` on. Raises BundleError if that fails."""
    try:
        data = read_at(descriptor, nbytes, offset)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read {nbytes} bytes at byte {offset} ({error.strerror}); "
            f"{remedy_for(error)}"
        ) from error
    if len(data) != nbytes:
        raise damaged(
            path,
            f"read {len(data)} of {nbytes} bytes at byte {offset}; the file was cut meanwhile",
        )
    return data


def sha256_of(path: Path, nbytes: int, progress: Callable[[int], object]) -> str:
    """Return a file's sha256. Raises BundleError unless the file has `nbytes` bytes."""
    descriptor = open_plain(path, "file")
    try:
        check_status(path, os.fstat(descriptor), nbytes)
        digest = hashlib.sha256()
        for at in range(0, nbytes, HASH_PIECE_NBYTES):
            piece = read_piece(path, descriptor, min(HASH_PIECE_NBYTES, nbytes - at), at)
            digest.update(piece)
            progress(len(piece))
        return digest.hexdigest()
    finally:
        disk.close(descriptor)
