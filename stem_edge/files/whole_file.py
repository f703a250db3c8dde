"""Small files written atomically: they are there whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from stem_edge.files import disk


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file beside its target, then rename it over an older one. Raises OSError.

    durable: survives a power cut, too.
    """
    beside = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        descriptor = disk.create(beside)
        try:
            disk.write_all(descriptor, data)
            if durable:
                disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
        disk.rename(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(beside)
        raise
    if durable:
        disk.sync_folder(path.parent)
