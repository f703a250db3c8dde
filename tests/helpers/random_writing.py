"""Texts that a model of random logits writes under a grammar, with the demo model's tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.runtime.grammars.constraint import GrammarConstraint, Grammars
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.text.codec import TextCodec

VOCAB_SIZE = 1800  # more than the tokenizer's 1,756 ids
EOS_IDS = (1501, 1505)
LIMIT = 600  # tokens of a text


@cache
def demo_codec() -> TextCodec:
    """The demo model's tokenizer."""
    folder = Path(stem_edge.__file__).parent / "demo_model"
    return TextCodec(folder / "tokenizer.json", VOCAB_SIZE)


@cache
def demo_grammars() -> Grammars:
    """Grammars for the demo model's tokenizer."""
    return Grammars(demo_codec(), EOS_IDS, VOCAB_SIZE)


@cache
def _closing() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What raises the logits of tokens that lead to an end: more for those that only close."""
    texts = [demo_codec().decode([number]) for number in range(VOCAB_SIZE)]
    raised = np.array([float(text[:1] in tuple('}],"')) for text in texts], np.float32)
    raised[[number for number, text in enumerate(texts) if text in tuple('}]"')]] = 2
    raised[list(EOS_IDS)] = 3
    return raised


def write(constraint: GrammarConstraint, seed: int) -> str | None:
    """Return a text written with logits that favour an end ever more; None if it does not end."""
    rng, written = np.random.default_rng(seed), list[int]()
    for step in range(LIMIT):
        logits = rng.gumbel(size=VOCAB_SIZE).astype(np.float32) + _closing() * np.float32(step / 15)
        constraint.mask(logits)
        token = int(logits.argmax())
        if constraint.ended or token in EOS_IDS:
            return demo_codec().decode(written, skip_special_tokens=False)
        constraint.accept(token)
        written.append(token)
    return None


def allows(grammar: Grammar, text: str, *, special: bool = False) -> bool:
    """Whether each token of a text may follow, and then an end.

    special: names of special tokens in the text stand for these tokens.
    """
    codec, constraint = demo_codec(), demo_grammars().open(grammar)
    ids = codec.encode(text, add_special_tokens=False, special_tokens_in_text=special)
    for token in (*ids, EOS_IDS[1]):
        logits = np.zeros(VOCAB_SIZE, np.float32)
        constraint.mask(logits)
        if logits[token] != 0:
            return False
        if token not in EOS_IDS:
            constraint.accept(token)
    return True
