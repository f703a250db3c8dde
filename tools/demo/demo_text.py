"""Compose plain English from the facts, holding out one form of every fact of every country.

The model reads each fact in its other forms, and the held-out form with other countries. So a right
answer to a held-out prompt is composed by the model, not recited.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from demo_facts import FACTS, FOLLOWING, NAMING, TURNED, Country

TURNED_SHARE = 0.1  # of sentences that name the country; more leave less training for answers
MAX_NEIGHBOURS = 3  # in a sentence


class Prompt(NamedTuple):
    """A held-out sentence, cut before its answer. `text` has no trailing space."""

    country: Country
    fact: str
    text: str


class Composer:
    """Composer of texts about `countries`; the same seed gives the same texts."""

    def __init__(self, countries: list[Country], seed: int) -> None:
        self.countries = countries
        self.random = random.Random(seed)
        self.held_naming = {
            (c.name, f): self.random.choice(NAMING[f]) for c in countries for f in FACTS
        }
        self.held_following = {
            (c.name, f): self.random.choice(FOLLOWING[f]) for c in countries for f in FACTS
        }

    def training_documents(self, count: int) -> list[str]:
        return [self._document() for _ in range(count)]

    def heldout_paragraphs(self) -> list[str]:
        """Compose a paragraph for each country, from held-out forms only."""
        shuffled = self.random.sample(self.countries, len(self.countries))
        return [self._heldout_paragraph(country) for country in shuffled]

    def prompts(self) -> list[Prompt]:
        """Return a prompt for every fact of every country, in the held-out form of this fact."""
        return [
            Prompt(country, fact, cut_before_answer(self.held_naming[country.name, fact], country))
            for country in self.countries
            for fact in known_facts(country)
        ]

    def _document(self) -> str:
        """Compose a sentence, or one to three paragraphs on lines of their own."""
        if self.random.random() < 0.35:
            country = self.random.choice(self.countries)
            return self._naming(country, self.random.choice(known_facts(country)))
        about = self.random.sample(self.countries, self.random.choice((1, 1, 2, 3)))
        return "\n".join(self._paragraph(country) for country in about)

    def _paragraph(self, country: Country) -> str:
        known = known_facts(country)
        facts = self.random.sample(known, self.random.randint(2, len(known)))
        first, *later = facts
        sentences = [self._naming(country, first), *(self._later(country, f) for f in later)]
        return " ".join(sentences)

    def _heldout_paragraph(self, country: Country) -> str:
        facts = known_facts(country)
        self.random.shuffle(facts)
        forms = [self.held_naming[country.name, facts[0]]]
        forms += [self.held_following[country.name, fact] for fact in facts[1:]]
        return " ".join(self._fill(form, country) for form in forms)

    def _naming(self, country: Country, fact: str) -> str:
        turned = TURNED.get(fact)
        if turned and self.random.random() < TURNED_SHARE:
            return self._fill(self.random.choice(turned), country)
        return self._trained(NAMING[fact], self.held_naming[country.name, fact], country)

    def _later(self, country: Country, fact: str) -> str:
        if self.random.random() < 0.25:
            return self._naming(country, fact)
        return self._trained(FOLLOWING[fact], self.held_following[country.name, fact], country)

    def _trained(self, forms: tuple[str, ...], held: str, country: Country) -> str:
        return self._fill(self.random.choice([form for form in forms if form != held]), country)

    def _fill(self, form: str, country: Country) -> str:
        """Fill a sentence form with facts of `country`; up to three neighbours, in any order."""
        count = min(len(country.neighbours), self.random.randint(1, MAX_NEIGHBOURS))
        some = self.random.sample(country.neighbours, count)
        return sentence(form.format_map(country._asdict() | {"neighbours": listed(some)}))


def known_facts(country: Country) -> list[str]:
    """Return the names of the facts that `country` has: islands have no neighbours."""
    return [fact for fact in FACTS if getattr(country, fact)]


def cut_before_answer(form: str, country: Country) -> str:
    """Return a form with the name of `country`, cut before the answer and the space before it."""
    before_answer = form[: form.rindex("{")].rstrip()
    return sentence(before_answer.format(name=country.name))


def is_right(prompt: Prompt, continuation: str) -> bool:
    """Return True if `continuation` answers `prompt`; any right neighbours are enough."""
    answer, stop, _ = continuation.strip().partition(".")
    if not stop:
        return False
    if prompt.fact != "neighbours":
        return bool(answer == getattr(prompt.country, prompt.fact))
    named = answer.replace(" and ", ", ").split(", ")
    return set(named) <= set(prompt.country.neighbours)


def sentence(text: str) -> str:
    """Capitalize the first letter, for names such as "the Bahamas"."""
    return text[0].upper() + text[1:]


def listed(names: list[str]) -> str:
    """Join names: ["A", "B", "C"] gives "A, B and C"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
