"""Models of tokenizers: the same ids from what is written anew, and the memory that is forecast."""

from __future__ import annotations

import itertools
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from contract import refused
from text_codecs import probe_texts
from tokenizer_files import added, write
from tokenizers import Tokenizer

from stem_edge.bundle import checked_tokenizer
from stem_edge.errors import BundleError, MemoryPlanError
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text import tokenizer_gate, tokenizer_model

CHARS = string.ascii_letters + string.digits
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["é", -1], ["è", -1]]}
# Prints the bytes that loading a tokenizer.json takes at its peak and keeps, and those forecast.
TAKEN = """
import sys
from pathlib import Path
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.system.memory import own_memory, return_freed_memory

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

TextCodec(Path(sys.argv[2]))  # what is imported and compiled once does not count
return_freed_memory()
Path("/proc/self/clear_refs").write_text("5")
before, marked = own_memory(), peak()
codec = TextCodec(Path(sys.argv[1]))
memory = codec._checked.memory
print(peak() - marked, own_memory() - before, *memory)
"""


def bpe(size: int, separator: str | None = None, extra: str = "") -> dict[str, Any]:
    """Make a model of so many tokens up to four characters, each with all merges that lead to it."""
    lengths = (map("".join, itertools.product(CHARS, repeat=n)) for n in range(1, 5))
    tokens = [*itertools.islice(itertools.chain(*lengths), size), *([extra] if extra else [])]
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [[t[:k], t[k:]] for t in tokens if t != extra for k in range(1, len(t))][: 2 * size]
    merges = pairs if separator is None else [separator.join(pair) for pair in pairs]
    return {"type": "BPE", "vocab": vocab, "merges": merges}


@pytest.mark.parametrize(
    "options", [{}, {"separator": " "}, {"extra": "a b"}, {"extra": "#version"}]
)
def test_merges_are_read_as_the_library_reads_the_original(
    tmp_path: Path, options: dict[str, str]
) -> None:
    path = write(tmp_path / "tokenizer.json", bpe(5000, **options))
    codec, original = TextCodec(path), Tokenizer.from_file(str(path))
    for text in ("the quick brown fox", "abc" * 50, "zz9 a b #version", *probe_texts()):
        assert codec.encode(text) == original.encode(text).ids


@pytest.mark.parametrize(
    ("model", "limit", "value", "named"),
    [
        (bpe(64), "MAX_TOKENS", 62, "model.vocab has more than 62 entries"),
        (bpe(64), "MAX_MERGES_IN_ALL", 1, "model.merges has more than 1 entries for 64 tokens"),
        (UNIGRAM, "MAX_PIECES_NBYTES", 3, "the tokens of model.vocab have 4 bytes"),
    ],
)
def test_limits_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, limit: str, value: int, named: str
) -> None:
    path = write(tmp_path / "tokenizer.json", model)
    TextCodec(path)
    monkeypatch.setattr(tokenizer_model, limit, value)
    refused(lambda: TextCodec(path), BundleError, path, named)


@pytest.mark.parametrize(
    ("limit", "value", "parts", "named"),
    [
        ("MAX_ADDED_NBYTES", 3, {"added_tokens": [added(2, "<x>"), added(3, "c")]}, "have 4 bytes"),
        ("MAX_OTHER_PART_NBYTES", 9, {"decoder": {"type": "Fuse"}}, "decoder has 1"),
        ("MAX_VALUES", 1, {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "normalizer has some 3"),
        ("MAX_PART_NBYTES", {"normalizer": 9}, {"normalizer": {"type": "NFC"}}, "normalizer has 1"),
        ("MAX_PART_NBYTES", {"added_tokens": 9}, {"added_tokens": [added(2, "c")]}, "added_tokens has"),
    ],
)  # fmt: skip
def test_limits_of_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: Any, parts: Any, named: str
) -> None:
    path = write(tmp_path / "tokenizer.json", **parts)
    TextCodec(path)
    monkeypatch.setattr(tokenizer_gate, limit, value)
    refused(lambda: TextCodec(path), BundleError, path, named)


def test_a_tokenizer_that_takes_more_than_the_limit_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "tokenizer.json", bpe(5000))
    TextCodec(path, limit=10**6)
    monkeypatch.setattr(checked_tokenizer, "SMALL_NBYTES", 1 << 20)
    TextCodec(path, limit=10**10)
    refused(lambda: TextCodec(path, limit=10**6), MemoryPlanError, path, "1 MB is too small")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts memory so")
@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (49_152, "BPE"),
        (100, "BPE with unknown fields"),
        pytest.param(262_144, "BPE", marks=pytest.mark.slow),
        pytest.param(262_144, "BPE with spaces", marks=pytest.mark.slow),
        pytest.param(100_000, "Unigram", marks=pytest.mark.slow),
        pytest.param(262_144, "WordLevel", marks=pytest.mark.slow),
    ],
)
def test_memory_is_as_forecast(tmp_path: Path, size: int, kind: str) -> None:
    """At most a few MB more, and not much less; the kept part includes Python's own."""
    model = bpe(size, extra="a b" if kind == "BPE with spaces" else "")
    if kind == "BPE with unknown fields":
        model |= dict.fromkeys(map(str, range(300_000)))
    if kind == "Unigram":
        model = {"type": kind, "unk_id": 0, "vocab": [[token, -1] for token in model["vocab"]]}
    if kind == "WordLevel":
        model = {"type": kind, "unk_token": "a", "vocab": model["vocab"]}
    path, small = tmp_path / "tokenizer.json", tmp_path / "small.json"
    write(path, model), write(small, bpe(100))
    done = subprocess.run(
        [sys.executable, "-c", TAKEN, str(path), str(small)],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, after, kept, loading = map(int, done.stdout.split())
    assert 0.5 * loading - 5e6 < peak < 1.1 * loading + 8e6, done.stdout
    assert 0.5 * kept - 5e6 < after < 1.1 * kept + 8e6, done.stdout
