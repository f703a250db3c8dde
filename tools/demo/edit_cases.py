"""Ask a model about countries, with and without an edit."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

from demo_facts import NAMING, Country, countries
from demo_text import Prompt, cut_before_answer, is_right

from stem_edge import Edit, Model

# Length cases by the sign of n_s - n_t: tokens of " " + name of the source and of the target.
LENGTHS = {0: "n_s = n_t", 1: "n_s > n_t", -1: "n_s < n_t"}
ANSWER_TOKENS = 24  # enough for the longest answer


class Pair(NamedTuple):
    """A country (source) that is edited to answer as another one (target) does."""

    source: Country
    target: Country
    lengths: str  # one of LENGTHS


def question(country: Country) -> str:
    """Return a sentence about a country up to the space before its capital."""
    return cut_before_answer(NAMING["capital"][0], country)


def bare(country: Country) -> str:
    """Return the name without its article, as an edit uses it."""
    return country.name.removeprefix("the ")


def name_tokens(model: Model, country: Country) -> list[int]:
    """Token ids of the name within a sentence."""
    return model.tokenize(" " + bare(country), add_special_tokens=False)


def pairs_of(model: Model, count: int | None, seed: int) -> list[Pair]:
    """Sample ordered pairs of countries: `count` of each length case, or all."""
    known, generator, chosen = countries(), random.Random(seed), list[Pair]()
    length = {country: len(name_tokens(model, country)) for country in known}
    for sign, case in LENGTHS.items():
        pairs = [
            Pair(source, target, case)
            for source, target in itertools.permutations(known, 2)
            if (length[source] > length[target]) - (length[source] < length[target]) == sign
        ]
        wanted = len(pairs) if count is None else min(count, len(pairs))
        chosen += generator.sample(pairs, wanted)
    return chosen


def ask(model: Model, prompt: str) -> str:
    """Generate greedily up to the first full stop, with the edits that are active on the model."""
    text = ""
    for chunk in model.generate(prompt, max_new_tokens=ANSWER_TOKENS):
        text += chunk.text
        if "." in text:
            break
    return text.partition(".")[0] + "." * ("." in text)


def answers(text: str, country: Country) -> bool:
    """Return whether a text is the capital of a country."""
    return is_right(Prompt(country, "capital", ""), text)


class Unedited:
    """Cache of a model's answers without edits. No edit may be active when it is asked."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._known: dict[Country, bool] = {}

    def knows(self, country: Country) -> bool:
        """Return whether the model knows the capital."""
        if country not in self._known:
            self._known[country] = answers(ask(self.model, question(country)), country)
        return self._known[country]

    def can_flip(self, pair: Pair) -> bool:
        """Return whether an edit would show: both answers are right, and they differ."""
        source, target, _ = pair
        return source.capital != target.capital and self.knows(source) and self.knows(target)

    def flip(self, pair: Pair, edit: Edit) -> str:
        """Return which answer comes with an edit: "target", "source" or "neither"."""
        with self.model.edited(edit):
            found = ask(self.model, question(pair.source))
        if answers(found, pair.target):
            return "target"
        return "source" if answers(found, pair.source) else "neither"
