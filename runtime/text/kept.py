"""A memory-mapped BPE tokenizer that loads only the tokens and merges that a text needs.

The tokenizers library takes a second and 70 MB to load 262,144 tokens with half a million merges. A
text has the same token ids if the library has all tokens that are substrings of the text's words,
and all merges between these tokens.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

from stem_edge import __version__
from stem_edge.bundle.checked_tokenizer import CheckedTokenizer
from stem_edge.bundle.manifest import digest
from stem_edge.files import disk
from stem_edge.numerics.quantize import I64

Keys = npt.NDArray[np.uint64]
FORMAT, TOKENIZERS = 1, "tokenizers"  # folder in the user's cache folder
# A file contains a checksum, the length of its Header, the Header, then the arrays, wide types first.
PREFIX_NBYTES, ALIGNMENT = 8, 8
ARRAYS = {"keys": "<u8", "pairs": "<u8", "ids": "<i4", "ends": "<u4", "ranks": "<i4", "text": "u1"}
# Above these limits, the whole tokenizer is as fast: characters of a text, parts of its words, loaded tokens.
MOST_CHARS, MOST_PARTS, MOST_READ = 1 << 14, 1 << 16, 1 << 13
MOST_WRITTEN = 1 << 8  # tokens of the decoder, which is built again when it needs another token


class Header(msgspec.Struct, frozen=True):
    """Header of a tokenizer cache file, before its arrays.

    always: ids of tokens that every text needs. longest: characters of the longest token. sizes:
    array name -> length.
    """

    checked: CheckedTokenizer  # its JSON has only the added tokens, and no merges
    settings: dict[str, Any]  # of the library's BPE
    always: list[int]
    longest: int
    sizes: dict[str, int]


class Listener:
    """Records a text's words as a pre-tokenizer; an own class, to avoid a reference cycle."""

    def __init__(self) -> None:
        self.words = list[str]()

    def pre_tokenize(self, text: Any) -> None:
        self.words += [word for word, *_ in text.get_splits()]


class KeptTokenizer:
    """A tokenizer that loads only the tokens that a text or ids need. Not thread-safe."""

    def __init__(self, header: Header, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self._header, self._arrays = header, arrays
        self.checked = msgspec.structs.replace(header.checked, json=b"")
        self._whole: Tokenizer | None = None
        self._tokens, self._merges = dict[str, int](), dict[int, tuple[str, str]]()  # by rank
        self._always = {self._token(id_): id_ for id_ in header.always}
        self._reader, self._written = self._empty(), dict[int, str]()
        self._writer, self._listener = self._empty(), Listener()
        listening = [pre_tokenizers.PreTokenizer.custom(self._listener)]
        if self._reader.pre_tokenizer is not None:
            listening.insert(0, self._reader.pre_tokenizer)
        self._reader.pre_tokenizer = pre_tokenizers.Sequence(listening)
        self._read({}, {})

    def for_ids(self, ids: Collection[int]) -> Tokenizer:
        if self._whole is not None:
            return self._whole
        if set(ids) - self._written.keys():
            known = self._written if len(self._written) <= MOST_WRITTEN else {}
            known = known | {id_: self._token(id_) for id_ in ids}
            tokens = {text: id_ for id_, text in known.items() if text}
            self._writer.model = models.BPE(tokens, [])
            self._written = known  # last, because a signal handler may raise an error anywhere
        return self._writer

    def for_text(self, text: str, special_tokens_in_text: bool) -> Tokenizer:
        if self._whole is not None or len(text) > MOST_CHARS:
            return self.whole()
        self._listener.words.clear()
        self._reader.encode_special_tokens = not special_tokens_in_text
        self._reader.encode(text)
        words, longest = set(self._listener.words), self._header.longest
        if sum(len(word) * min(len(word), longest) for word in words) > MOST_PARTS:
            return self.whole()
        tokens = self._tokens_in(words)
        if tokens.keys() - self._tokens.keys():
            self._read(tokens, self._merges_to(tokens))
        return self._reader if len(self._tokens) <= MOST_READ else self.whole()

    def whole(self) -> Tokenizer:
        if self._whole is None:
            text, ends = bytes(self._arrays["text"]), self._arrays["ends"].tolist()
            starts = [0, *ends[:-1]]
            texts = [text[start:end].decode() for start, end in zip(starts, ends, strict=True)]
            pairs = self._arrays["pairs"][np.argsort(self._arrays["ranks"])]
            merges = [(texts[pair >> 32], texts[pair & 0xFFFFFFFF]) for pair in pairs.tolist()]
            tokens = {token: id_ for id_, token in enumerate(texts) if token}
            whole = self._empty()
            whole.model = models.BPE(tokens, merges, **self._header.settings)
            self._whole = whole
        return self._whole

    def _empty(self) -> Tokenizer:
        return Tokenizer.from_buffer(self._header.checked.json)

    def _read(self, tokens: dict[str, int], merges: dict[int, tuple[str, str]]) -> None:
        tokens, merges = self._tokens | tokens, self._merges | merges
        ordered = [merges[rank] for rank in sorted(merges)]
        self._reader.model = models.BPE(self._always | tokens, ordered, **self._header.settings)
        self._tokens, self._merges = tokens, merges

    def _token(self, id_: int) -> str:
        ends = self._arrays["ends"]
        if not 0 <= id_ < len(ends):
            return ""
        start = int(ends[id_ - 1]) if id_ else 0
        return bytes(self._arrays["text"][start : int(ends[id_])]).decode()

    def _tokens_in(self, words: Iterable[str]) -> dict[str, int]:
        """Return all tokens that are substrings of a word, with their ids."""
        longest = self._header.longest
        parts = list(
            {
                word[start:end]
                for word in words
                for start in range(len(word))
                for end in range(start + 1, min(start + longest, len(word)) + 1)
            }
        )
        places = _find(np.fromiter(map(key_of, parts), np.uint64, len(parts)), self._arrays["keys"])
        found = (
            (parts[at], int(self._arrays["ids"][places[at]])) for at in np.flatnonzero(places + 1)
        )
        return {part: id_ for part, id_ in found if self._token(id_) == part}

    def _merges_to(self, tokens: dict[str, int]) -> dict[int, tuple[str, str]]:
        """Return the merges that result in these tokens, as rank -> pair of tokens."""
        splits = ((token[:at], token[at:]) for token in tokens for at in range(1, len(token)))
        pairs = [(a, b) for a, b in splits if a in tokens and b in tokens]
        keys = np.fromiter(
            (pair_key(tokens[a], tokens[b]) for a, b in pairs), np.uint64, len(pairs)
        )
        places = _find(keys, self._arrays["pairs"])
        ranks = self._arrays["ranks"]
        return {int(ranks[places[at]]): pairs[at] for at in np.flatnonzero(places + 1)}


def kept_file(root: Path, tokenizer: Path, vocab_size: int) -> Path:
    """Return the cache file of a tokenizer.json in its current state. Raises OSError."""
    found = disk.status(tokenizer)
    # st_ctime, because a copy may keep size and time of change (cp -p, rsync -t).
    times = found.st_mtime_ns, found.st_ctime_ns
    versions = digest(FORMAT, __version__, tokenizers.__version__)
    facts = str(tokenizer.resolve()), found.st_size, *times, vocab_size
    return root / TOKENIZERS / f"{versions}-{digest(*facts)}"


def key_of(token: str) -> int:
    """Return a 64-bit hash of a token. Tokenizers in which hashes collide are not cached."""
    data = token.encode()
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def pair_key(first: int, second: int) -> int:
    return first << 32 | second


def _find(wanted: Keys, among: Keys) -> I64:
    """Return the index of each wanted key in the sorted array `among`; -1 for absent keys."""
    if not len(among):
        return np.full(len(wanted), -1, np.int64)
    places = np.searchsorted(among, wanted).clip(max=len(among) - 1)
    return np.where(among[places] == wanted, places, -1)


def open_kept(path: Path) -> KeptTokenizer | None:
    """Open a tokenizer cache file; None if it is missing or damaged."""
    try:
        descriptor = disk.open_file(path)
        try:
            data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        view = memoryview(data)
        checksum, nbytes = np.frombuffer(view[:PREFIX_NBYTES], "<u4").tolist()
        if zlib.crc32(view[PREFIX_NBYTES:]) != checksum:
            return None
        at = PREFIX_NBYTES + nbytes
        header = msgspec.msgpack.decode(view[PREFIX_NBYTES:at], type=Header)
        at += -at % ALIGNMENT
        arrays = {}
        for name, kind in ARRAYS.items():
            end = at + header.sizes[name] * np.dtype(kind).itemsize
            arrays[name], at = np.frombuffer(view[at:end], kind), end
        return KeptTokenizer(header, arrays)
    except (OSError, ValueError, KeyError):  # msgspec raises ValueError
        return None
