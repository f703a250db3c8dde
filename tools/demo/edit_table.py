"""Measure how often an edit makes the demo model answer for one country as it does for another.

    python tools/demo/edit_table.py [BUNDLE] [--pairs COUNT | --all]

For a sample of ordered pairs of countries, or for all, it edits the source to answer as the target does
and asks for the capital. Only pairs that the unedited model answers correctly and differently are
counted. Prints Markdown tables by scheme and scope, and by edited layers. Columns are length cases:
the number of tokens of the source's name, n_s, against that of the target's, n_t.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from edit_cases import LENGTHS, Pair, Unedited, bare, pairs_of

import stem_edge
from stem_edge import Edit, Model, make_edit
from stem_edge.bundle.edit_files.file import SCOPES
from stem_edge.bundle.edit_files.schemes import FITS, Scheme
from stem_edge.progress import show_status

DEMO = Path(stem_edge.__file__).parent / "demo_model"
CONTEXT = 64  # tokens, for a question and an answer
OUTCOMES = ("target", "source", "neither")


class Case(NamedTuple):
    """An edit, and the row of the table that counts it."""

    labels: tuple[str, ...]
    pair: Pair
    edit: Edit


# labels -> length case -> outcomes
Table: TypeAlias = dict[tuple[str, ...], dict[str, Counter[str]]]


def by_scheme(model: Model, pairs: Sequence[Pair]) -> Iterator[Case]:
    """Yield edits with every scheme that fits, in both scopes."""
    for scheme, scope, pair in itertools.product(FITS, SCOPES, pairs):
        if scheme in schemes_for(pair.lengths):
            names = bare(pair.source), bare(pair.target)
            edit = make_edit(model.bundle, *names, scheme=scheme, scope=scope)
            yield Case((scheme, scope), pair, edit)


def schemes_for(lengths: str) -> list[Scheme]:
    """Return the schemes for a length case, without those that equal a swap there."""
    sign = next(sign for sign, name in LENGTHS.items() if name == lengths)
    if sign == 0:
        return ["swap", "average"]
    return [scheme for scheme, signs in FITS.items() if sign in signs]


def by_layers(model: Model, pairs: Sequence[Pair]) -> Iterator[Case]:
    """Yield edits of each STEM layer, each pair of them, and all."""
    stem_layers = model.config.stem_layers
    subsets: list[tuple[int, ...]] = [(layer,) for layer in stem_layers]
    subsets += list(itertools.combinations(stem_layers, 2)) if len(stem_layers) > 2 else []
    subsets.append(stem_layers)
    for layers, pair in itertools.product(subsets, pairs):
        label = "all" if layers == stem_layers else ", ".join(map(str, layers))
        edit = make_edit(model.bundle, bare(pair.source), bare(pair.target), layers=layers)
        yield Case((label,), pair, edit)


def tally(cases: Iterator[Case], unedited: Unedited, title: str) -> Table:
    """Count the outcomes of the cases in which an edit would show."""
    table: Table = {}
    for number, (labels, pair, edit) in enumerate(cases):
        if number % 20 == 0:
            show_status(f"{title}: {number:,} cases")
        if unedited.can_flip(pair):
            outcome = unedited.flip(pair, edit)
            table.setdefault(labels, {}).setdefault(pair.lengths, Counter())[outcome] += 1
    show_status("")
    return table


def print_table(headers: Sequence[str], table: Table) -> None:
    """Print a table as Markdown, with a column for each length case."""
    columns = [*headers, *LENGTHS.values()]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for labels, row in table.items():
        cells = [cell(row[lengths]) if lengths in row else "" for lengths in LENGTHS.values()]
        print(f"| {' | '.join([*labels, *cells])} |")
    print(flush=True)


def cell(found: Counter[str]) -> str:
    """Format the outcomes as percentages."""
    return " / ".join(f"{100 * found[outcome] / found.total():.1f}" for outcome in OUTCOMES)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", nargs="?", type=Path, default=DEMO, metavar="BUNDLE")
    pairs = "pairs of each length case (default 150)"
    parser.add_argument("--pairs", type=int, default=150, metavar="COUNT", help=pairs)
    every = "all pairs in the table by scheme; takes half an hour"
    parser.add_argument("--all", action="store_true", help=every)
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default 1)")
    args = parser.parse_args()
    print("Answers in %: the target's / the source's / neither.\n")
    with stem_edge.load(args.bundle, context_length=CONTEXT) as model:
        unedited = Unedited(model)
        some = pairs_of(model, args.pairs, args.seed)
        many = pairs_of(model, None, args.seed) if args.all else some
        print_table(("scheme", "scope"), tally(by_scheme(model, many), unedited, "schemes"))
        print_table(("layers",), tally(by_layers(model, some), unedited, "layers"))


if __name__ == "__main__":
    main()
