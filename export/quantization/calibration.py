"""What a text tells the exporter: how often tokens occur, and which channels are large."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from stem_edge.bundle.prefill_check import PROBE_TOKENS
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.numerics.quantize import F32, I64
from stem_edge.numerics.reference import forward

# Read when there is no text of the user's: prose, a name, a number, code.
PROBE_TEXT = """\
The quick brown fox jumps over the lazy dog. In 1969, Ada Lovelace's notes were already 126 years
old: "for n in range(10): print(n * n)" would have made sense to her, I think. Wouldn't it?"""
READ_CHARS = 1 << 20
SEQUENCE_TOKENS = 512  # as long as a typical use, short enough that a layer's attention is small


def read_token_ids(file: str | Path | None, converted: ExportedTokenizer, vocab_size: int) -> I64:
    """Ids of a text, or of a file of ids (.npy, or .int32 as little-endian); empty without one."""
    if file is None:
        return np.zeros(0, np.int64)
    path = Path(file)
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("no such file")
        if path.suffix == ".npy":
            ids = _load(path)
        elif path.suffix == ".int32":
            ids = np.fromfile(path, "<i4")
        else:
            ids = _encode(Tokenizer.from_str(converted.json), path)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise ExportError(
            f"{path}: cannot read ({one_line(error, 160)}); give a text in UTF-8, or token ids as .npy or .int32"
        ) from error
    if ids.dtype.kind not in "iu" or not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise ExportError(
            f"{path}: expected token ids of 0 to {vocab_size - 1}; it holds "
            f"{f'{ids.min()} to {ids.max()}' if len(ids) else 'none'}"
        )
    checked: I64 = ids.astype(np.int64)
    return checked


def _load(path: Path) -> npt.NDArray[Any]:
    """An array that is as large as its file; what its header says is not allocated."""
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("not an array of numpy")
    try:
        found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (SyntaxError, TokenError, TypeError) as error:  # numpy's, of a header that is no header
        raise ValueError("its header is damaged") from error
    return np.array(found).reshape(-1)


def _encode(tokenizer: Tokenizer, path: Path) -> I64:
    """In pieces that end with a line, because a tokenizer takes a hundred bytes for a character."""
    ids: list[I64] = [np.zeros(0, np.int64)]
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(READ_CHARS):
            text = "".join(lines)
            ids.append(np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64))
    return np.concatenate(ids)


def probe_ids(text_ids: I64, converted: ExportedTokenizer, max_context: int) -> list[int]:
    """A few tokens for comparing the bundle with its checkpoint: the last of the text."""
    count = min(PROBE_TOKENS, max_context)
    if not len(text_ids):
        return list(Tokenizer.from_str(converted.json).encode(PROBE_TEXT).ids[:count])
    ids: list[int] = text_ids[-count:].tolist()
    return ids


def sequences(text_ids: I64, tokens: int, max_context: int) -> list[list[int]]:
    """About so many tokens of a text in sequences from all over it, none overlapping; or all.

    But not the last, which judge the result, unless there are hardly any others.
    """
    if len(text_ids) >= 2 * PROBE_TOKENS:
        text_ids = text_ids[:-PROBE_TOKENS]
    length = min(SEQUENCE_TOKENS, max_context, tokens, len(text_ids))
    count = min(-(-tokens // length), len(text_ids) // length)
    starts = np.linspace(0, len(text_ids) - length, count).astype(int)
    return [text_ids[start : start + length].tolist() for start in starts]


def observe(checkpoint: Checkpoint, token_ids: list[int]) -> tuple[F32, dict[str, F32]]:
    """The checkpoint's own logits [T, V], and of each group of matrices the greatest magnitude of
    every input channel [K] (names as stem_edge.numerics.reference.Observer has them)."""
    peaks: dict[str, F32] = {}

    def see(name: str, x: F32) -> None:
        peaks[name] = np.abs(x).max(axis=0)

    logits = forward(
        checkpoint.config, checkpoint.backbone, checkpoint.rows, token_ids, observe=see
    )
    return logits, peaks
