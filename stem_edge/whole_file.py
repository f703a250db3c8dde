"""Small files that are there whole or not at all, whatever ends the writing."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file beside its place and put it there; an older one is replaced. Raises OSError.

    durable: through a power cut, too.
    """
    beside = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with beside.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable; Windows cannot open folders and needs no such call."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
