"""Reads token ids from a file: a text in UTF-8, or ids as .npy or little-endian .int32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import I64
from stem_edge.shown import one_line

READ_CHARS = 1 << 20


def read_ids(path: Path, encode: Callable[[str, bool], Sequence[int]], vocab_size: int) -> I64:
    """Return the token ids [T] of a file. Raises InputError.

    encode: returns the token ids of a piece of a text; its second argument is True for the first piece.
    """
    try:
        if not path.is_file():  # refuses pipes, too: reading one could wait for ever
            raise ValueError("no such file")
        if path.suffix == ".npy":
            # Mapped first, so that memory is taken only for what the file holds.
            ids = np.array(np.lib.format.open_memmap(path, mode="r"))
        elif path.suffix == ".int32":
            ids = np.frombuffer(path.read_bytes(), "<i4")
        else:
            ids = _encoded(path, encode)
    except Exception as error:  # numpy raises errors of many types for a damaged header
        raise InputError(
            f"{path}: cannot read ({one_line(error, 160)}); give a text in UTF-8, or token ids as "
            ".npy or .int32"
        ) from error
    some = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size
    if not some or ids.min() < 0 or ids.max() >= vocab_size:
        other = f"shape {list(ids.shape)} of {ids.dtype.name}" if ids.size else "none"
        raise InputError(
            f"{path}: expected a flat list of token ids from 0 to {vocab_size - 1}; found "
            f"{f'{ids.min()} to {ids.max()}' if some else other}"
        )
    return ids.astype(np.int64)


def _encoded(path: Path, encode: Callable[[str, bool], Sequence[int]]) -> I64:
    """Encode a text, some lines at a time: tokenizers need 100 bytes for each character."""
    ids = [np.zeros(0, np.int64)]
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(READ_CHARS):
            ids.append(np.array(encode("".join(lines), len(ids) == 1), np.int64))
    return np.concatenate(ids)
