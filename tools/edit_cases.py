"""Questions about countries, and what a model answers to them with and without an edit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from demo_facts import NAMING, Country, countries
from demo_text import Prompt, cut_before_answer, is_right, known_facts

from stem_edge import Edit, Model
from stem_edge.edit_schemes import FITS, Scheme

# Length cases: tokens of " " + name of the source against the target's, by the sign of n_s - n_t.
LENGTHS = {0: "n_s = n_t", 1: "n_s > n_t", -1: "n_s < n_t"}
ANSWER_TOKENS = 24  # the longest answer names three neighbours


class Pair(NamedTuple):
    """A country that is edited to answer as another one does."""

    source: Country
    target: Country
    lengths: str  # one of LENGTHS


class Question(NamedTuple):
    """A sentence about a country, to be ended by one of its facts."""

    country: Country
    fact: str
    form: str  # of demo_facts.NAMING

    @property
    def prompt(self) -> str:
        """The sentence up to the space before its answer."""
        return cut_before_answer(self.form, self.country)

    def about(self, country: Country) -> Question:
        """The same of another country."""
        return self._replace(country=country)


CAPITAL = NAMING["capital"][0]


class Answer(NamedTuple):
    """What a model goes on with, up to the first full stop."""

    text: str
    token_ids: tuple[int, ...]
    probability: float  # of all its tokens, one after the other


@dataclass
class Tally:
    """Answers with an edit: the target's, the source's or neither, and what the target's got."""

    cases: int = 0
    target: int = 0
    source: int = 0
    probability: float = 0.0  # of the target's answer, summed over cases

    def add(self, outcome: str, probability: float) -> None:
        """Count an outcome, "target", "source" or "neither"."""
        self.cases += 1
        self.target += outcome == "target"
        self.source += outcome == "source"
        self.probability += probability


def bare(country: Country) -> str:
    """The name without its article: what an edit names."""
    return country.name.removeprefix("the ")


def name_tokens(model: Model, country: Country) -> list[int]:
    """Token ids of the name within a sentence."""
    return model.tokenize(" " + bare(country), add_special_tokens=False)


def pairs_of(model: Model, count: int | None, seed: int) -> list[Pair]:
    """Ordered pairs of countries in random order: `count` of each length case, or all there are."""
    known = countries()
    length = {country.name: len(name_tokens(model, country)) for country in known}
    by_lengths: dict[str, list[Pair]] = {name: [] for name in LENGTHS.values()}
    for source in known:
        for target in known:
            if source is not target:
                sign = _sign(length[source.name] - length[target.name])
                by_lengths[LENGTHS[sign]].append(Pair(source, target, LENGTHS[sign]))
    generator = random.Random(seed)
    return [
        pair
        for pairs in by_lengths.values()
        for pair in generator.sample(pairs, len(pairs) if count is None else min(count, len(pairs)))
    ]


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def schemes_for(lengths: str) -> list[Scheme]:
    """Schemes that are for a length case; those that are a swap there are left out."""
    sign = next(sign for sign, name in LENGTHS.items() if name == lengths)
    fitting: list[Scheme] = [scheme for scheme, signs in FITS.items() if sign in signs]
    return fitting if sign else ["swap", "average"]


def questions(country: Country) -> list[Question]:
    """Every sentence form of every fact that the country has."""
    return [Question(country, fact, form) for fact in known_facts(country) for form in NAMING[fact]]


def about_others(name: str) -> list[Question]:
    """Every question about every country but the one of this name."""
    return [one for country in countries() if country.name != name for one in questions(country)]


def ask(model: Model, prompt: str) -> Answer:
    """The greedy answer, with whatever edits the model is in."""
    text, token_ids, logprob = "", [], 0.0
    for chunk in model.generate(prompt, max_new_tokens=ANSWER_TOKENS, logprobs=0):
        text += chunk.text
        token_ids += chunk.token_ids
        logprob += sum(token.logprob for token in chunk.logprobs or [])
        if "." in text:
            break
    return Answer(text.partition(".")[0] + "." * ("." in text), tuple(token_ids), math.exp(logprob))


def probability_of(model: Model, prompt: str, token_ids: Sequence[int]) -> float:
    """Probability of these tokens after a prompt, with whatever edits the model is in."""
    before = model.tokenize(prompt)
    logits = model.logits([*before, *token_ids])[len(before) - 1 : -1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chosen = logits[np.arange(len(token_ids)), list(token_ids)]
    return float(np.exp((chosen - np.log(np.exp(logits).sum(-1))).sum()))


class Unedited:
    """Answers of a model without edits, each asked for once. Use it where the model is in none."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._answers: dict[Question, Answer] = {}
        self._tokens: dict[Question, list[int]] = {}

    def answer(self, question: Question) -> Answer:
        """The answer to a question."""
        if question not in self._answers:
            self._answers[question] = ask(self.model, question.prompt)
        return self._answers[question]

    def tokens(self, question: Question) -> list[int]:
        """Token ids of the question."""
        if question not in self._tokens:
            self._tokens[question] = self.model.tokenize(question.prompt)
        return self._tokens[question]

    def knows(self, question: Question) -> bool:
        """Whether that is right."""
        return answers(self.answer(question).text, question)

    def can_flip(self, question: Question, target: Country) -> bool:
        """Whether an edit can be seen: both answers are right, and the facts differ."""
        fact = question.fact
        if not (getattr(question.country, fact) and getattr(target, fact)):
            return False
        if fact == "neighbours":
            differ = not set(question.country.neighbours) & set(target.neighbours)
        else:
            differ = getattr(question.country, fact) != getattr(target, fact)
        return differ and self.knows(question) and self.knows(question.about(target))

    def flip(self, question: Question, target: Country, edit: Edit) -> tuple[str, float]:
        """With an edit: whose answer it is, "target", "source" or "neither", and the probability of
        the answer that the target has."""
        wanted = self.answer(question.about(target))
        with self.model.edited(edit):
            found = ask(self.model, question.prompt)
            if found.token_ids == wanted.token_ids:
                return "target", found.probability
            probability = probability_of(self.model, question.prompt, wanted.token_ids)
        if answers(found.text, question.about(target)):
            return "target", probability
        return "source" if answers(found.text, question) else "neither", probability


def answers(text: str, question: Question) -> bool:
    """Whether a text is a right answer: of neighbours, any that are."""
    return is_right(Prompt(question.country, question.fact, question.prompt), text)
