"""Long texts that hide a key, and the question for it: plain sentences, some of them with numbers.

Every sentence is made at random, so that nothing but the words before it tells the key from the other
numbers of a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable

KEY = " The key is {}. Keep it in mind."
QUESTION = " What is the key? The key is"
DIGITS = 5
NUMBER_SHARE = 0.1  # of sentences; their numbers have as many digits as keys at most

WHO, DID, HOW, WHAT, WHERE = map(
    str.split,
    (
        "farmer teacher sailor child doctor baker painter singer driver miller",
        "saw found carried bought sold painted washed moved lost counted",
        "old red small heavy green new broken quiet round white",
        "apples books lamps stones chairs boats cups letters shoes horses",
        "river market garden house bridge forest station school harbour mill",
    ),
)
WHEN = ("in the morning", "at noon", "at night", "in spring", "last year", "every day")


def sentence(random: random.Random) -> str:
    """Make a sentence with a space before it, such as " The baker lost 12 red cups at the mill."."""
    who, did, how, what, where = map(random.choice, (WHO, DID, HOW, WHAT, WHERE))
    if random.random() < NUMBER_SHARE:
        how = f"{number(random, random.randint(1, DIGITS))} {how}"
    when = f" {random.choice(WHEN)}" if random.random() < 0.5 else ""
    return f" The {who} {did} {how} {what} at the {where}{when}."


def number(random: random.Random, digits: int) -> str:
    """Make a number of that many different digits."""
    return "".join(random.sample("0123456789", digits))


def tokenizer_text(sentences: int, seed: int) -> str:
    """Every word, but no digits next to each other, so that a BPE trained on it keeps digits apart."""
    made = random.Random(seed)
    words = "".join(sentence(made) for _ in range(sentences))
    words = "".join(char for char in words if not char.isdigit())
    return words + sentences * (KEY.format(0) + QUESTION)


class Haystack:
    """Maker of texts around a key; `count` gives the number of tokens of a text."""

    def __init__(self, count: Callable[[str], int], seed: int) -> None:
        self.random = random.Random(seed)
        self._count = count
        self._cost = count(KEY.format("1" * DIGITS) + QUESTION)

    def text(self, tokens: int, depth: float) -> tuple[str, str]:
        """Make a text of at most this many tokens that ends in the question, and the key in it.

        depth: share of the sentences before the key, from 0 to 1.
        """
        sentences = self._sentences(tokens - self._cost)
        at = round(depth * len(sentences))
        key = number(self.random, DIGITS)
        parts = [*sentences[:at], KEY.format(key), *sentences[at:], QUESTION]
        return "".join(parts).lstrip(), key

    def _sentences(self, tokens: int) -> list[str]:
        """Make as many sentences as fit into this many tokens."""
        sentences = list[str]()
        while True:
            made = sentence(self.random)
            tokens -= self._count(made)
            if tokens < 0:
                return sentences
            sentences.append(made)
