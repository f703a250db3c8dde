"""Writes the tokenizer cache file, from which kept.py loads only the tokens that a text needs.

Run as a program: PATH VOCAB_SIZE KEPT LIMIT (tokenizer.json, number of ids, file to write, bytes of
memory). It reports no errors: the parent process finds the same faults itself.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, models

from stem_edge.bundle.checked_tokenizer import CheckedTokenizer
from stem_edge.errors import BundleError, StemEdgeError
from stem_edge.files.disk import write_whole
from stem_edge.runtime.text.keeping_child import writable
from stem_edge.runtime.text.kept import ALIGNMENT, ARRAYS, Header, key_of, pair_key
from stem_edge.shown import printable
from stem_edge.system.memory import own_memory, return_freed_memory
from stem_edge.text.tokenizer_gate import check_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
SETTINGS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", *AFFIXES)


def read_checked(
    path: Path, vocab_size: int | None, limit: int | None
) -> tuple[CheckedTokenizer, Tokenizer]:
    """Check and load a tokenizer.json, within `limit` bytes. Raises BundleError, MemoryPlanError."""
    checked = check_tokenizer(path, vocab_size)
    return_freed_memory()  # what checking took, since loading may take as much
    if limit is not None:
        checked.memory.check(path, limit)
    try:
        return checked, Tokenizer.from_buffer(checked.json)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        said = printable(" ".join(str(error).split())[:300])
        raise BundleError(
            f"{path}: not a tokenizer.json ({said}); export the bundle again"
        ) from None


def keep(path: Path, checked: CheckedTokenizer, tokenizer: Tokenizer, limit: int | None) -> None:
    """Write the tokenizer cache file `path` of a BPE tokenizer, if its folder is writable.

    checked, tokenizer: results of read_checked. limit: most bytes of memory of this process.
    """
    # This is slow, and takes as much memory as the library's tokenizer (37 of 42 MB with 128,256 tokens).
    if limit is not None and own_memory() + checked.memory.kept > limit:
        return
    if not isinstance(tokenizer.model, models.BPE) or not writable(path.parent):
        return
    if (found := _parts(checked, tokenizer)) is None:
        return
    header, arrays = found
    body = msgspec.msgpack.encode(header)
    padding = bytes(-len(body) % ALIGNMENT)
    data = b"".join(
        [body, padding, *(arrays[name].astype(kind).tobytes() for name, kind in ARRAYS.items())]
    )
    prefix = np.array([zlib.crc32(data), len(body)], "<u4").tobytes()
    with contextlib.suppress(OSError):
        write_whole(path, prefix + data)


def main() -> None:
    path, vocab_size, kept, left = sys.argv[1:]
    limit = int(left) if left else None
    checked, tokenizer = read_checked(Path(path), int(vocab_size) if vocab_size else None, limit)
    keep(Path(kept), checked, tokenizer, limit)


def _merges(model: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Yield pairs of tokens that merge, one at a time, because all pairs take 100 MB."""
    return (m.split(" ") if isinstance(m, str) else m for m in model["merges"])


def _parts(checked: CheckedTokenizer, tokenizer: Tokenizer) -> tuple[Header, dict[str, Any]] | None:
    """Return the tokenizer cache file's contents; None if using it could change token ids."""
    file = msgspec.json.decode(checked.json)
    model = file["model"]
    ids: dict[str, int] = model.get("vocab", {})
    unknown = model.get("unk_token")
    added = {token["content"]: token["id"] for token in file["added_tokens"]}
    if (
        model.get("type") != "BPE"
        or any(map(model.get, AFFIXES))
        or "" in ids
        or (unknown is not None and unknown not in ids)
        or any(tokenizer.token_to_id(token) != id_ for token, id_ in added.items())
    ):
        return None
    named = {unknown, *(BYTES if model.get("byte_fallback") else ())}
    if any(not named.isdisjoint(pair) for pair in _merges(model)):
        return None  # the library looks such a token up, and could merge it with another
    keys = np.array([key_of(token) for token in ids], np.uint64)
    if len(np.unique(keys)) < len(keys):
        return None
    frame = model | {"vocab": added, "merges": []}
    pairs = np.fromiter((pair_key(ids[a], ids[b]) for a, b in _merges(model)), np.uint64)
    texts = [b""] * (max(ids.values()) + 1)
    for token, id_ in ids.items():
        texts[id_] = token.encode()
    arrays = {
        "keys": np.sort(keys),
        "ids": np.fromiter(ids.values(), np.int64, len(ids))[np.argsort(keys)],
        "ends": np.cumsum([len(text) for text in texts]),
        "pairs": np.sort(pairs),
        "ranks": np.argsort(pairs),
        "text": np.frombuffer(b"".join(texts), np.uint8),
    }
    header = Header(
        msgspec.structs.replace(checked, json=msgspec.json.encode(file | {"model": frame})),
        {name: model[name] for name in SETTINGS if model.get(name) is not None},
        [ids[token] for token in sorted(named & ids.keys())],
        max(map(len, ids)),
        {name: len(array) for name, array in arrays.items()},
    )
    return header, arrays


if __name__ == "__main__":
    with contextlib.suppress(StemEdgeError, OSError, MemoryError):
        main()
