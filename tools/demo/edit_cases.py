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
ANSWER_TOKENS = 24  # enough for three neighbours, the longest answer
CAPITAL = NAMING["capital"][0]


class Pair(NamedTuple):
    """A country (source) that is edited to answer as another one (target) does."""

    source: Country
    target: Country
    lengths: str  # one of LENGTHS


class Question(NamedTuple):
    """A sentence about a country that ends with one of its facts."""

    country: Country
    fact: str
    form: str  # of demo_facts.NAMING

    @property
    def prompt(self) -> str:
        """The sentence up to the space before its answer."""
        return cut_before_answer(self.form, self.country)

    def about(self, country: Country) -> Question:
        """Return the same question about another country."""
        return self._replace(country=country)


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


def answers(text: str, question: Question) -> bool:
    """Return whether a text answers a question; any true neighbours will do."""
    return is_right(Prompt(question.country, question.fact, question.prompt), text)


class Unedited:
    """Cache of a model's answers without edits. No edit may be active when it is asked."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._answers: dict[Question, str] = {}

    def answer(self, question: Question) -> str:
        """Return the answer to a question."""
        if question not in self._answers:
            self._answers[question] = ask(self.model, question.prompt)
        return self._answers[question]

    def knows(self, question: Question) -> bool:
        """Return whether the answer is right."""
        return answers(self.answer(question), question)

    def can_flip(self, question: Question, target: Country) -> bool:
        """Return whether an edit would show: both answers are right, and they differ."""
        facts = getattr(question.country, question.fact), getattr(target, question.fact)
        return facts[0] != facts[1] and self.knows(question) and self.knows(question.about(target))

    def flip(self, question: Question, target: Country, edit: Edit) -> str:
        """Return which answer comes with an edit: "target", "source" or "neither"."""
        with self.model.edited(edit):
            found = ask(self.model, question.prompt)
        if answers(found, question.about(target)):
            return "target"
        return "source" if answers(found, question) else "neither"
