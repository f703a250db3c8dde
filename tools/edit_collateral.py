"""What an edit changes besides what it is for: answers about countries that it does not name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from demo_facts import Country, countries
from edit_cases import CAPITAL, Pair, Question, Unedited, about_others, ask, bare

from stem_edge import make_edit
from stem_edge.bundle import TOKENIZER
from stem_edge.edit_file import Edit
from stem_edge.runtime.overlay import Overlay
from stem_edge.runtime.text import TextCodec


@dataclass
class Collateral:
    """Answers to questions about other countries than the source of an edit."""

    edits: int = 0
    asked: Counter[str] = field(default_factory=Counter)  # by fact
    touched: Counter[str] = field(default_factory=Counter)  # those that look up an edited row
    changed: Counter[str] = field(default_factory=Counter)
    names: Counter[tuple[str, str]] = field(default_factory=Counter)  # changed: source, other

    def share(self, facts: Sequence[str]) -> float:
        """Share of changed answers about these facts."""
        asked = sum(self.asked[fact] for fact in facts)
        return sum(self.changed[fact] for fact in facts) / asked if asked else 0.0


def everywhere(unedited: Unedited, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Collateral]]:
    """Of each pair, what an edit that holds everywhere does to every question about others."""
    for pair in pairs:
        names = bare(pair.source), bare(pair.target)
        edit = make_edit(unedited.model.bundle, *names, scope="everywhere")
        yield pair, changes(unedited, edit, pair.source.name)


def changes(unedited: Unedited, edit: Edit, source: str) -> Collateral:
    """What an edit that holds everywhere does to every question about other countries than `source`.

    A question in which no edited token comes, nor in its answer, cannot change, because all that is
    computed is the same; it counts as asked.
    """
    model = unedited.model
    edited = set(Overlay(TextCodec(model.bundle.file(TOKENIZER)), model.config, [edit]).of_token)
    found = Collateral(edits=1)
    for question in about_others(source):
        found.asked[question.fact] += 1
        before = unedited.answer(question)
        if not edited & {*unedited.tokens(question), *before.token_ids}:
            continue
        found.touched[question.fact] += 1
        with model.edited(edit):
            answer = ask(model, question.prompt)
        if answer.token_ids != before.token_ids:
            found.changed[question.fact] += 1
            found.names[source, question.country.name] += 1
    return found


def merged(parts: Sequence[Collateral]) -> Collateral:
    """The sum of several."""
    total = Collateral()
    for part in parts:
        total.edits += part.edits
        total.asked += part.asked
        total.touched += part.touched
        total.changed += part.changed
        total.names += part.names
    return total


def two_countries(
    unedited: Unedited, pairs: Sequence[Pair], seed: int
) -> Iterator[tuple[Pair, bool, bool | None]]:
    """Of each pair, with an edit where the source is named, of two capitals in one prompt: whether
    another country's stays as it was, asked for after the source's; and whether the source's is the
    target's, asked for after the other's (None where that cannot be seen).

    Each country has a line for itself, as in the text that the model learned from; on one line it
    mixes countries up without any edit.
    """
    model, generator = unedited.model, random.Random(seed)
    for pair in pairs:
        others = [country for country in countries() if country not in pair[:2]]
        other = generator.choice(others)
        edit = make_edit(model.bundle, bare(pair.source), bare(pair.target))
        prompt = f"{_stated(pair.source)}\n{Question(other, 'capital', CAPITAL).prompt}"
        before = ask(model, prompt)
        with model.edited(edit):
            stays = ask(model, prompt).token_ids == before.token_ids
        question = Question(pair.source, "capital", f"{_stated(other)}\n{CAPITAL}")
        flips = None
        if unedited.can_flip(question, pair.target):
            flips = unedited.flip(question, pair.target, edit)[0] == "target"
        yield pair, stays, flips


def _stated(country: Country) -> str:
    return CAPITAL.format_map(country._asdict())
