"""A BPE tokenizer of random words, as large as Gemma's: byte tokens, about two merges a token.

It takes as much time and memory to read as Gemma's tokenizer, but its words mean nothing.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
UNUSED = 6_242  # tokens named <unusedN>, at most; BPE never splits or merges them
# First and last character of the scripts whose characters are tokens.
SCRIPTS = ("az", "!~", "¡ſ", "Ͱϡ", "Аӿ", "अॿ", "一兿", "가괿", "ぁヿ")
MAX_CHARS = 16
# Most words are an early word and one of 14 letters, so that 262,144 words have 505,000 merges.
ANY_END, LETTERS, EARLY = 0.05, 14, 1.5


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, with a token for every id, and tokenizer_config.json.

    llama.cpp's converter would drop embedding rows of ids without a token.
    """
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    room = vocab_size - len(SPECIAL) - len(bytes_)
    unused = [f"<unused{number}>" for number in range(min(UNUSED, room // 8))]
    words = list(itertools.islice(_words(), room - len(unused)))
    names = [*SPECIAL, *bytes_, *words, *unused]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab, _merges(words), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in unused])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name[1:-1]}_token": name for name in SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def _words() -> Iterator[str]:
    """Yield distinct words without end: characters, then joined pairs of earlier words."""
    chars = [SPACE, *(chr(c) for ends in SCRIPTS for c in range(ord(ends[0]), ord(ends[1]) + 1))]
    words, drawn = list(dict.fromkeys(chars)), random.Random(0)
    yield from words
    seen = set(words)
    while True:
        places = [int(len(words) * drawn.random() ** EARLY) for _ in range(2)]
        end = places[1] if drawn.random() < ANY_END else drawn.randrange(LETTERS)
        word = words[places[0]] + words[end]
        if len(word) <= MAX_CHARS and word not in seen:
            seen.add(word)
            words.append(word)
            yield word


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Return all pairs of words that join to a word, like converters of sentencepiece do."""
    known = set(words)
    splits = ((word[:at], word[at:]) for word in words for at in range(1, len(word)))
    return [pair for pair in splits if known.issuperset(pair)]
