"""Measure how often an edit makes the demo model answer for one country as it does for another.

    python tools/demo/edit_table.py [BUNDLE] [--all]

For ordered pairs of countries (a sample, or all), edits the first country (the source) to answer like the
second (the target), and asks for the capital of the source. Only pairs count for which the unedited model
gives both capitals correctly and they differ. Prints Markdown tables by scheme and scope, and by edited
layers. Columns compare n_s and n_t, the numbers of tokens in the names of source and target.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from demo_facts import NAMING, Country, countries
from demo_text import cut_before_answer

import stem_edge
from stem_edge import Edit, Model, make_edit
from stem_edge.bundle.edit_files.file import SCOPES
from stem_edge.bundle.edit_files.schemes import FITS
from stem_edge.commands.running.demo import demo_bundle
from stem_edge.progress import show_status

CONTEXT = 64  # tokens, for a question and an answer
ANSWER_TOKENS = 24  # enough for the longest answer
SAMPLE = 150  # pairs for each sign of n_s - n_t
OUTCOMES = ("target", "source", "neither")
# Sign of n_s - n_t -> title of the column.
LENGTHS = {0: "n_s = n_t", 1: "n_s > n_t", -1: "n_s < n_t"}


class Pair(NamedTuple):
    """A country to edit (source), and the country to answer like (target). sign: of n_s - n_t."""

    source: Country
    target: Country
    sign: int

    @property
    def names(self) -> tuple[str, str]:
        """Both names without their articles, as an edit uses them."""
        return self.source.name.removeprefix("the "), self.target.name.removeprefix("the ")


def pairs_of(model: Model, count: int | None) -> Iterator[Pair]:
    """Yield pairs with different capitals that the model knows: `count` for each sign, or all."""
    length = {
        one: len(model.tokenize(f" {one.name.removeprefix('the ')}", add_special_tokens=False))
        for one in countries()
        if answered(model, one) == one.capital
    }
    chance = random.Random(1)
    for sign in LENGTHS:
        found = [
            Pair(source, target, sign)
            for source, target in itertools.permutations(length, 2)
            if (length[source] > length[target]) - (length[source] < length[target]) == sign
            and source.capital != target.capital
        ]
        yield from found if count is None else chance.sample(found, min(count, len(found)))


def answered(model: Model, country: Country) -> str:
    """Ask for the capital of a country; return the answer up to the first full stop."""
    prompt = cut_before_answer(NAMING["capital"][0], country)
    text = model.generate_text(prompt, max_new_tokens=ANSWER_TOKENS, stop=["."])
    return text.strip()


def by_scheme(model: Model, pair: Pair) -> Iterator[tuple[str, Edit]]:
    """Yield (label, edit) for each scheme that fits, in both scopes, unless it equals swap."""
    for scheme, signs in FITS.items():
        equal = pair.sign == 0 and scheme not in ("swap", "average")
        for scope in SCOPES if pair.sign in signs and not equal else ():
            edit = make_edit(model.bundle, *pair.names, scheme=scheme, scope=scope)
            yield f"{scheme} | {scope}", edit


def by_layers(model: Model, pair: Pair) -> Iterator[tuple[str, Edit]]:
    """Yield (label, edit) for each STEM layer, each pair of STEM layers, and all of them."""
    layers = model.config.stem_layers
    for count in sorted({1, 2, len(layers)}):
        for some in itertools.combinations(layers, count):
            label = "all" if some == layers else ", ".join(map(str, some))
            yield label, make_edit(model.bundle, *pair.names, layers=some)


def print_table(
    head: str,
    model: Model,
    edits: Callable[[Model, Pair], Iterable[tuple[str, Edit]]],
    pairs: Sequence[Pair],
) -> None:
    """Apply the edits to all pairs, count the answers, and print a Markdown table in percent."""
    table: dict[str, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for number, pair in enumerate(pairs):
        show_status(f"{head}: {number} of {len(pairs)} pairs")
        for label, edit in edits(model, pair):
            with model.edited(edit):
                found = answered(model, pair.source)
            outcome = {pair.target.capital: "target", pair.source.capital: "source"}
            table[label][pair.sign][outcome.get(found, "neither")] += 1
    show_status("")
    columns = [*head.split(" | "), *LENGTHS.values()]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for label, row in table.items():
        print(f"| {' | '.join([label, *(cell(row[sign]) for sign in LENGTHS)])} |")
    print(flush=True)


def cell(found: Counter[str]) -> str:
    total = found.total()
    return " / ".join(f"{100 * found[each] / total:.1f}" for each in OUTCOMES) if total else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", nargs="?", type=Path, default=demo_bundle(), metavar="BUNDLE")
    every = "all pairs in the table by scheme; takes half an hour"
    parser.add_argument("--all", action="store_true", help=every)
    args = parser.parse_args()
    print("Answers in %: the target's / the source's / neither.\n")
    with stem_edge.load(args.bundle, context_length=CONTEXT) as model:
        some = list(pairs_of(model, SAMPLE))
        many = list(pairs_of(model, None)) if args.all else some
        print_table("scheme | scope", model, by_scheme, many)
        print_table("layers", model, by_layers, some)


if __name__ == "__main__":
    main()
