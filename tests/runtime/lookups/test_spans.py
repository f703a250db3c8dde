"""Find texts in token ids, with the demo's tokenizer, bytes, and sentencepiece's decoders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from installed import DEMO
from text_codecs import END, TOOL, saved
from text_codecs import byte_level as byte_level_codec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.spans import Span, find_spans, text_of, tokens_after
from stem_edge.runtime.text.codec import TextCodec

# Byte-level pieces that end within a character, or span the end of one.
PIECES = [b" Spain", b"Ger", b"many", "本".encode()[:2], "本".encode()[2:] + "日".encode()[:1]]
PIECES += ["日".encode()[1:], " é".encode(), "人人".encode(), b'"Spain', b"Spain.", b" \xf0\x9f"]
SP_WORDS = ["▁Spain", "▁Germany", "Spain", "▁", "Ger", "many", "▁is", "▁The", ",", "▁é", "."]


@pytest.fixture(scope="module")
def demo() -> TextCodec:
    return TextCodec(DEMO / TOKENIZER)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return byte_level_codec(tmp_path_factory.mktemp("bytes"), PIECES)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A codec like sentencepiece: ▁ for spaces and before every text, bytes for unknown characters."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(SP_WORDS)}
    scores = [(word, -float(len(SP_WORDS[0]) - len(word))) for word in vocab]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *scores], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return saved(tokenizer, tmp_path_factory.mktemp("sp"))


def ids_of(*tokens: bytes) -> list[int]:
    """Token ids of the byte-level tokenizer."""
    return [256 + PIECES.index(token) if token in PIECES else token[0] for token in tokens]


def places(codec: TextCodec, prompt: str, wanted: str) -> list[str]:
    """The text of the tokens of each span."""
    ids = codec.encode(prompt)
    text, starts, ends = text_of(codec, ids)
    return [
        text[starts[start] : ends[stop - 1]] for start, stop, _ in find_spans(codec, ids, wanted)
    ]


def check(codec: TextCodec, ids: Sequence[int]) -> str:
    """Check an invariant: every character belongs to tokens, in their order."""
    text, starts, ends = text_of(codec, ids)
    assert len(starts) == len(ends) == len(ids)
    assert starts == sorted(starts) and ends == sorted(ends)
    assert all(0 <= a <= b <= len(text) for a, b in zip(starts, ends, strict=True))
    owned = {at for a, b in zip(starts, ends, strict=True) for at in range(a, b)}
    assert owned == set(range(len(text)))
    return text


TEXTS = [
    "The capital of Spain is Madrid.", "", " ", "  two  spaces \n\n\tand a tab",
    "e\u0301 é 日本人 naïve 👍🏽👨\u200d👩\u200d👧 🇩🇪", "a\ufffdb \ufffd\ufffd Spain \ufffd",
    "\0\x80\u2028",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_texts_ids_is_that_text(
    text: str, demo: TextCodec, byte_level: TextCodec, sentences: TextCodec
) -> None:
    for codec in (demo, byte_level, sentences):
        ids = codec.encode(text, add_special_tokens=False)
        assert check(codec, ids) == codec.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("prompt", "wanted", "found"),
    [
        ("The capital of Spain is", "Spain", [" Spain"]),
        ("Spain, Spain's king; (Spain)", "Spain", ["Spain", " Spain", "Spain"]),
        ("spain\nSpain\tSpain", "Spain", ["Spain", "Spain"]),
        ("Nigeria and Niger", "Niger", [" Niger"]), ("Romania, not Oman", "Oman", [" Oman"]),
        ("Niger/Nigeria", "Niger", ["Niger"]),
        ("Spain2 2Spain Spain_1 über-Spain", "Spain", [" Spain", "Spain"]),
        ("the United States of America.", "United States of America", None),
        ("Guinea-Bissau or Guinea", "Guinea-Bissau", None),
        ("ESPAÑA Espan\u0303a Espan", "Espan", [" Espan"]), ("Spain Spain", "Spain Spain", None),
        ("plan Best, plan B", "plan B", ["plan B"]), ("AB plan, B plan", "B plan", ["B plan"]),
    ],
)  # fmt: skip
def test_a_text_is_found_where_it_is_a_word(
    prompt: str, wanted: str, found: list[str] | None, demo: TextCodec
) -> None:
    texts = places(demo, prompt, wanted)
    assert [text.strip(' ,"') for text in texts] == [wanted] * len(found or [1])
    if found is not None:
        assert all(text.endswith(end.strip()) for text, end in zip(texts, found, strict=True))


def test_characters_that_are_no_text_are_in_no_span(byte_level: TextCodec) -> None:
    """U+FFFD may be half a character; what follows it is not."""
    ids = [*"\ufffd".encode(), *ids_of(b" Spain")]
    assert find_spans(byte_level, ids, "Spain") == [Span(3, 4, " ")]
    for broken in ([0x80], [0xE2, 0x82], [0xF0, 0x9F, 0x98], [0x80] * 9, [0xC3] * 9):
        for behind in ([], broken):
            found = find_spans(byte_level, [*broken, *ids_of(b" Spain"), *behind], "Spain")
            assert found == [Span(len(broken), len(broken) + 1, " ")]


@pytest.mark.parametrize("seed", range(3))
def test_any_ids_have_a_text_and_places(
    seed: int, demo: TextCodec, byte_level: TextCodec, sentences: TextCodec
) -> None:
    rng = random.Random(seed)
    for codec, size in ((demo, 1756), (byte_level, 258 + len(PIECES)), (sentences, 258)):
        for _ in range(50):
            pool = [rng.randrange(size) for _ in range(rng.randint(1, 8))]
            check(codec, [rng.choice(pool) for _ in range(rng.randint(1, 40))])


def test_a_special_token_is_found_whole_and_never_in_part(byte_level: TextCodec) -> None:
    ids = [*byte_level.encode("end" + END + "tool" + TOOL + END)]
    assert len(ids) == 3 + 1 + 4 + 1 + 1
    assert find_spans(byte_level, ids, END) == [Span(3, 4, ""), Span(9, 10, "")]
    assert find_spans(byte_level, ids, "end") == [Span(0, 3, "")]
    assert find_spans(byte_level, ids, "end" + END) == [Span(0, 4, "")]
    # An added token that is not special is ordinary text.
    assert find_spans(byte_level, ids, "tool") == [Span(4, 8, ""), Span(8, 9, "<")]
    with pytest.raises(InputError, match="not in the prompt"):
        find_spans(byte_level, ids[3:4], "end")


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("The capital of Spain is", "spain"), ("Romania", "Oman"), ("x\ny", "Spain")],
)
def test_absent_texts(prompt: str, wanted: str, demo: TextCodec) -> None:
    with pytest.raises(InputError, match=f"'{wanted}' is not in the prompt .*spelling.*everywhere"):
        find_spans(demo, demo.encode(prompt), wanted)


def test_tokens_of_a_text_behind_another(demo: TextCodec, sentences: TextCodec) -> None:
    for before, text in ((" ", "Spain"), ("", "Spain"), ("\n", "Spain"), ('"', "Spain")):
        ids = tokens_after(demo, before, text)
        assert demo.decode(ids).strip(' "\n') == "Spain"
    for before in ("", " "):
        ids = tokens_after(sentences, before, "Germany")
        assert sentences.decode(ids).strip() == "Germany"


def test_a_text_that_the_tokenizer_changes_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "spain": 1}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    codec = saved(tokenizer, tmp_path)
    assert tokens_after(codec, "", "spain") == [1]
    for text in ("Spain", "france"):
        with pytest.raises(InputError, match=f"turns '{text}' into .*that it can represent"):
            tokens_after(codec, "", text)
    with pytest.raises(InputError, match="not valid Unicode"):
        tokens_after(codec, "", "\udcff")
