"""Streams of text: never half a character, and nothing of a stop text."""

import copy
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from text_codecs import byte_level, saved
from threads import run_script
from tokenizers import Tokenizer, decoders, models, normalizers

from stem_edge.errors import InputError
from stem_edge.runtime.rows.rows import Rows
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scheduling.request import Chunk, Request
from stem_edge.runtime.text.codec import TextCodec, TextRoom
from stem_edge.runtime.text.stream import TokenStream
from stem_edge.system.memory import own_memory

# A token id below 256 is that byte; these are the others.
PIECES = [b"ab", b"abc", b"bc", "é".encode(), "€".encode()[:2], "€".encode()[2:] + b"!"]
PIECES += ["😀".encode()[:3], "😀".encode()[3:] + "é".encode()[:1], b"END", b"\n\n"]
PIECE_IDS = {piece: 256 + i for i, piece in enumerate(PIECES)}
SPECIAL = 256 + len(PIECES)  # leaves no text
ADDED = SPECIAL + 1  # "<tool>", leaves its text


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return byte_level(tmp_path_factory.mktemp("codec", numbered=False), PIECES)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    pieces = ["<unk>", "\u2581", "a", "1", "x", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    return saved(tokenizer, tmp_path_factory.mktemp("sentencepiece", numbered=False))


# In a process of its own: what other tests left in the heap changes a peak by a quarter.
PEAKS = r"""
import sys
from pathlib import Path
from stem_edge.runtime.text.codec import TEXT_NBYTES, TextCodec
from stem_edge.system.memory import return_freed_memory

codec, nbytes, peaks = TextCodec(Path(sys.argv[1])), 200_000, []
for text in ("a", " 1", "\n x1", " ", "\u0f0b", "\U0001f9a4", "a,"):
    codec.encode(text)  # what it makes at its first call
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    for times in (0, nbytes // len(text.encode())):
        codec.encode(text * times)
        status = Path("/proc/self/status").read_text()
        peaks.append(int(status.split("VmHWM:")[1].split()[0]) << 10)
    assert 50 * nbytes < peaks[-1] - peaks[-2] < TEXT_NBYTES * nbytes * 1.02, (text, peaks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts memory so")
@pytest.mark.usefixtures("codec", "sentencepiece")
def test_a_text_takes_no_more_than_its_forecast(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("codec", "sentencepiece"):
        done = run_script(PEAKS, tmp_path_factory.getbasetemp() / name / "tokenizer.json")
        assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    ("planned", "left", "fine"), [(48_000, 0, True), (47_999, 0, False), (0, 1 << 30, True)]
)
def test_a_text_that_may_take_more_than_is_left_is_refused(
    planned: int, left: int, fine: bool, codec: TextCodec
) -> None:
    codec = copy.copy(codec)
    codec.room = TextRoom(planned, own_memory() + left)
    if fine:
        assert len(codec.encode("a" * 100)) == 100
    else:
        with pytest.raises(InputError, match="100 bytes, which may take 48 kB"):
            codec.encode("a" * 100)


def test_bytes_of_byte_level_tokens(codec: TextCodec) -> None:
    assert [codec.token_bytes(byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert [codec.token_bytes(i) for i in PIECE_IDS.values()] == PIECES
    assert [codec.token_bytes(i) for i in (SPECIAL, ADDED)] == [b"<|end|>", b"<tool>"]
    assert codec.token_bytes(999) == b""
    assert codec.every_token(ADDED + 1) == [codec.token_bytes(i) for i in range(ADDED + 1)]


def test_bytes_of_tokens_with_spaces_and_byte_fallback(tmp_path: Path) -> None:
    pieces = ["<unk>", "<0xE2>", "\u2581a", "b\u2581", "é"]
    model = models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    found = map(saved(tokenizer, tmp_path).token_bytes, range(len(pieces)))
    assert [*found] == [b"<unk>", b"\xe2", b" a", b"b ", "é".encode()]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "a<tool>b"),
        ({"skip_special_tokens": False}, "a<|end|><tool>b<|end|>"),
        ({"skip_special_tokens": False, "silent": {SPECIAL}}, "a<tool>b"),
        ({"silent": {ADDED, 97}}, "b"),
    ],
)
def test_which_tokens_a_stream_has(options: Any, text: str, codec: TextCodec) -> None:
    stream = TokenStream(codec, **options)
    assert "".join([*map(stream.push, [97, SPECIAL, ADDED, 98, SPECIAL]), stream.finish()]) == text


def test_kept_special_tokens_are_the_only_ones_in_a_text(codec: TextCodec) -> None:
    for kept, text in (("", "ab"), ("<|end|>", "a<|end|>b<|end|>"), ("<|other|>", "ab")):
        params = SamplingParams(kept_special_tokens=[kept] if kept else [])
        answer, found = Request([], None, 3, params, codec, []), list[Chunk | None]()
        answer.begin(Mock(rows=Rows(), steps=Mock(return_value=[])), Mock())
        for token in (97, SPECIAL, 98, SPECIAL):
            answer.choose(np.eye(ADDED + 1, dtype=np.float32)[token])
            found.append(answer.hand_out())
        assert "".join(chunk.text for chunk in found if chunk is not None) == text


def pieces_of(codec: TextCodec, token_ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """Collect what each push and the finish return."""
    stream = TokenStream(codec, stop)
    return [*[stream.push(token) for token in token_ids], stream.finish()]


def test_a_text_that_always_looks_unfinished_is_decoded_a_few_tokens_at_a_time(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, decode, sizes = [0xE2] * 1000, codec.decode, list[int]()

    def counted(ids: Sequence[int], **options: Any) -> str:
        sizes.append(len(ids))
        return decode(ids, **options)

    expected = codec.decode(token_ids)
    monkeypatch.setattr(codec, "decode", counted)
    assert "".join(pieces_of(codec, token_ids)) == expected
    assert max(sizes) < 32


@pytest.mark.parametrize(
    ("token_ids", "pieces"),
    [
        (b"ab", ["a", "b", ""]),
        ("aé".encode(), ["a", "", "é", ""]),
        ("😀b".encode(), ["", "", "", "😀", "b", ""]),
        ("e\u0301".encode(), ["e", "", "\u0301", ""]),  # what combines is a character of its own
        (b"a\xe2\x82", ["a", "", "", "\ufffd"]),  # the end is no character
        (b"\xffa", ["", "\ufffda", ""]),
        (b"\xe2a", ["", "\ufffda", ""]),
        ("\ufffda".encode(), ["", "", "", "\ufffda", ""]),  # it looks unfinished
        ([PIECE_IDS["€".encode()[:2]], PIECE_IDS["€".encode()[2:] + b"!"]], ["", "€!", ""]),
        ([0xE2, SPECIAL, 0x82, 0xAC], ["", "", "", "€", ""]),
        ([97, SPECIAL, 98, ADDED, SPECIAL], ["a", "", "b", "<tool>", "", ""]),
        ([], [""]),
    ],
)
def test_text_comes_as_soon_as_its_characters_are_whole(
    token_ids: Sequence[int], pieces: list[str], codec: TextCodec
) -> None:
    assert pieces_of(codec, list(token_ids)) == pieces


def random_ids(rng: random.Random) -> list[int]:
    """Whole characters, cut ones, stray bytes and special tokens in any order."""

    def some() -> list[int]:
        kind = rng.randrange(6)
        char = list(rng.choice("aé€😀\u0301\ufffd\U0010ffff").encode())
        return [
            char,
            char[: rng.randint(1, len(char))],
            char[rng.randrange(len(char)) :],
            [rng.randrange(256)],
            [rng.choice([0x80, 0xC0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF])],
            [rng.randrange(256, ADDED + 1)],
        ][kind]

    def none() -> list[int]:
        return [rng.choice([0x80, 0x90, 0xBF, 0xE2, 0xF0, 0xF4, 0xFF, 999, SPECIAL])]

    make = rng.choice([some, some, none])
    return [token for _ in range(rng.randint(1, 12 if make is some else 60)) for token in make()]


@pytest.mark.parametrize("seed", range(4))
def test_streams_of_random_bytes_give_what_decoding_gives(seed: int, codec: TextCodec) -> None:
    rng = random.Random(seed)
    for _ in range(1000):
        token_ids = random_ids(rng)
        assert "".join(pieces_of(codec, token_ids)) == codec.decode(token_ids), token_ids


@pytest.mark.parametrize(
    ("token_ids", "stop", "pieces"),
    [
        (b"xEND", ["END"], ["x", "", "", "", ""]),
        (b"xENx", ["END"], ["x", "", "", "ENx", ""]),  # only looked like it
        (b"xEN", ["END"], ["x", "", "", "EN"]),
        (b"xENEND", ["END"], ["x", "", "", "EN", "", "", ""]),
        (b"aab", ["ab"], ["", "a", "", ""]),
        (b"ababac", ["abac"], ["", "", "", "ab", "", "", ""]),
        (b"xy", ["xy", "y"], ["", "", ""]),
        (b"abc", ["abc", "b"], ["", "a", "", ""]),
        ([PIECE_IDS[b"abc"]], ["abc", "b"], ["a", ""]),  # the same text gives the same
        (b"a\n\nb", ["\n\n"], ["a", "", "", "", ""]),
        ("x€".encode(), ["€"], ["x", "", "", "", ""]),
        ("xé".encode(), ["é"], ["x", "", "", ""]),
        (b"x\xe2\x82", ["\ufffd"], ["x", "", "", ""]),  # complete only when nothing follows
        ([120, PIECE_IDS[b"END"], 121], ["N"], ["x", "E", "", ""]),
        ([PIECE_IDS[b"abc"], 120], ["bcx"], ["a", "", ""]),
        ([ADDED], ["too"], ["<", ""]),
        ([97, SPECIAL, 98], ["ab"], ["", "", "", ""]),
    ],
)
def test_nothing_of_a_stop_text_goes_out(
    token_ids: Sequence[int], stop: list[str], pieces: list[str], codec: TextCodec
) -> None:
    assert pieces_of(codec, list(token_ids), stop) == pieces


def test_stopped_is_true_from_the_token_that_completes_the_stop(codec: TextCodec) -> None:
    stream = TokenStream(codec, ["ab"])
    seen = []
    for token in b"xabxyz":
        seen.append((stream.push(token), stream.stop_text == "ab"))
    assert seen == [("x", False), ("", False), *[("", True)] * 4]
    assert (stream.finish(), stream.stop_text) == ("", "ab")


def cut_randomly(text: bytes, rng: random.Random) -> list[int]:
    """Token ids of a text, cut in one of the ways that the vocabulary allows."""
    token_ids = []
    while text:
        size = rng.choice([n for n in (1, 2, 3) if n == 1 or text[:n] in PIECE_IDS])
        token_ids.append(text[0] if size == 1 else PIECE_IDS[text[:size]])
        text = text[size:]
    return token_ids


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop that is complete first (of several, the longest)."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("seed", range(4))
def test_the_first_complete_stop_ends_the_text_however_it_is_cut(
    seed: int, codec: TextCodec
) -> None:
    rng = random.Random(seed)

    def letters(longest: int) -> str:
        return "".join(rng.choice("abc") for _ in range(rng.randint(1, longest)))

    for _ in range(400):
        text, stop = letters(12), [letters(4) for _ in range(rng.randint(1, 3))]
        found = "".join(pieces_of(codec, cut_randomly(text.encode(), rng), stop))
        assert found == before_stop(text, stop), (text, stop)
