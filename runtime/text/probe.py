"""Use of a tokenizer in every way that might crash its process or never end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stem_edge.errors import BundleError, InputError
from stem_edge.runtime.text.codec import TextCodec

PROBED_IDS = 1 << 10  # decoded at once


def probe(codec: TextCodec) -> None:
    """Encode and decode texts, and decode all ids; call it in a child process with limits.

    Raises BundleError if the library fails.
    """
    try:
        for text in probe_texts(codec.special_tokens):
            for named in (False, True):
                codec.decode(codec.encode(text, special_tokens_in_text=named)[:PROBED_IDS])
        for first in range(0, codec.count, PROBED_IDS):
            codec.decode(range(first, first + PROBED_IDS), skip_special_tokens=False)
    except InputError as error:
        problem = str(error).rpartition("; ")[0]  # without the advice, which is for prompts
        raise BundleError(f"{problem}, found in a trial; export the bundle again") from None


def probe_texts(special_tokens: Sequence[str] = ()) -> Iterator[str]:
    """Yield texts that expose faulty tokenizers: runs, long words, every kind of character."""
    for char in ("a", "A", " ", "\n", "0", "_", ".", "\u00e9", "\u4e00", "\U0001f600", "\u0301"):
        yield char * 40 + "!"
        yield char * 4000
    yield "".join(map(chr, range(0x500)))
    yield " ".join(map(chr, range(0x300)))
    yield "".join(chr(code) for code in range(0x500, 0x110000, 509) if not 0xD800 <= code < 0xE000)
    yield "\ufdfa\u1e9e\u0130\ufb03" * 100
    yield "the quick brown fox's 12345 jumped; didn't it?\r\n\t" * 40
    yield "abcdefghijklmnopqrstuvwxyz" * 200
    yield from special_tokens[:64]
    yield " ".join(special_tokens[:1024])
    yield ""
