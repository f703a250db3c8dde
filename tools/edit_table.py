"""What edits of a model of countries do: whether answers flip, and whether others stay.

    python tools/edit_table.py [BUNDLE] [--pairs COUNT | --all] [--json FILE]

Edits each country (the source) to answer as another one does (the target), over a sample of ordered
pairs or all of them, and asks for the greedy answer up to the full stop. Only pairs count that the model
without an edit answers rightly, and differently. Prints markdown tables by length case (tokens of
the source n_s against the target's n_t): by scheme and scope, by the layers that are edited, by
fact and place of the name, and by what schemes leave open. Then what else changes, and whether all
is as before, bit by bit, when an edit is gone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from demo_facts import FACTS, NAMING
from edit_cases import (
    CAPITAL,
    LENGTHS,
    Pair,
    Question,
    Tally,
    Unedited,
    bare,
    name_tokens,
    pairs_of,
    schemes_for,
)
from edit_collateral import Collateral, everywhere, merged, two_countries

import stem_edge
from stem_edge import Edit, Model, make_edit
from stem_edge.edit_file import SCOPES
from stem_edge.edit_schemes import FITS
from stem_edge.progress import show_status
from stem_edge.quantize import F32

DEMO = Path(stem_edge.__file__).parent / "demo_model"
CONTEXT = 64  # tokens: two questions and an answer
ANSWERED = tuple(fact for fact in FACTS if fact != "neighbours")  # facts with one right answer
MOST_NAMES = 8  # of collateral changes to name
LEGEND = (
    "Answers in %: the target's / the source's / neither; then the mean probability of the "
    "target's answer."
)


class Case(NamedTuple):
    """One edit and one question."""

    labels: tuple[str, ...]  # of its row in a table
    pair: Pair
    question: Question
    edit: Edit


Table: TypeAlias = dict[tuple[str, ...], dict[str, Tally]]  # labels -> length case -> tally


def by_scheme(model: Model, pairs: Sequence[Pair]) -> Iterator[Case]:
    """The capital, with every scheme that fits and in both scopes."""
    for scheme, scope, pair in itertools.product(FITS, SCOPES, pairs):
        if scheme in schemes_for(pair.lengths):
            names = bare(pair.source), bare(pair.target)
            edit = make_edit(model.bundle, *names, scheme=scheme, scope=scope)
            yield Case((scheme, scope), pair, Question(pair.source, "capital", CAPITAL), edit)


def by_layers(model: Model, pairs: Sequence[Pair]) -> Iterator[Case]:
    """The capital, with the edit in some of the STEM layers."""
    stem_layers = model.config.stem_layers
    subsets: list[tuple[int, ...]] = [(layer,) for layer in stem_layers]
    subsets += list(itertools.combinations(stem_layers, 2)) if len(stem_layers) > 2 else []
    subsets.append(stem_layers)
    for layers, pair in itertools.product(subsets, pairs):
        label = "all" if layers == stem_layers else ", ".join(map(str, layers))
        edit = make_edit(model.bundle, bare(pair.source), bare(pair.target), layers=layers)
        yield Case((label,), pair, Question(pair.source, "capital", CAPITAL), edit)


def by_fact(model: Model, pairs: Sequence[Pair], seed: int) -> Iterator[Case]:
    """Every fact, in one of the sentences that begin with the name and in one of the others."""
    generator = random.Random(seed)
    places = (("within a sentence", False), ("at its beginning", True))
    for fact, (place, is_first) in itertools.product(FACTS, places):
        forms = [form for form in NAMING[fact] if form.startswith("{name}") == is_first]
        for pair in pairs if forms else ():
            question = Question(pair.source, fact, generator.choice(forms))
            edit = make_edit(model.bundle, bare(pair.source), bare(pair.target))
            yield Case((fact, place), pair, question, edit)


def by_choice(model: Model, pairs: Sequence[Pair]) -> Iterator[Case]:
    """The capital, with the tokens of a target that a subset can be, and with padding tokens."""
    end, begin = next(iter(model.config.eos_ids), None), model.config.bos_id
    paddings = {"end of text": end, "begin of text": begin, '" the"': " the"}
    for pair in pairs:
        names = bare(pair.source), bare(pair.target)
        question = Question(pair.source, "capital", CAPITAL)
        if pair.lengths == LENGTHS[-1]:
            for label, places in subsets_of(model, pair).items():
                edit = make_edit(model.bundle, *names, scheme="subset", subset=places)
                yield Case(("subset", label), pair, question, edit)
        elif pair.lengths == LENGTHS[1]:
            for label, pad in paddings.items():
                edit = make_edit(model.bundle, *names, scheme="pad-left", pad=pad)
                yield Case(("pad-left", label), pair, question, edit)


def subsets_of(model: Model, pair: Pair) -> dict[str, list[int]]:
    """Ways to choose as many tokens of the target as the source has, as places in it."""
    ids, count = name_tokens(model, pair.target), len(name_tokens(model, pair.source))
    places = range(len(ids))
    longest = sorted(places, key=lambda place: -len(model.detokenize([ids[place]]).strip()))
    # A byte pair encoding numbers tokens as it finds them, the frequent ones first.
    rarest = sorted(places, key=lambda place: -ids[place])
    return {
        "last tokens": list(places[-count:]),
        "first tokens": list(places[:count]),
        "most letters": sorted(longest[:count]),
        "rarest tokens": sorted(rarest[:count]),
    }


class Reversal:
    """Compares logits after an edit with those before any, bit by bit."""

    def __init__(self, model: Model) -> None:
        self.checked = self.equal = 0
        self._model = model
        self._before: dict[str, F32] = {}

    def keep(self, prompt: str) -> None:
        """Remember a prompt's logits, unless they are."""
        if prompt not in self._before:
            self._before[prompt] = self._logits(prompt)

    def check(self, prompt: str) -> None:
        """Compare them."""
        self.checked += 1
        self.equal += np.array_equal(self._logits(prompt), self._before[prompt])

    def _logits(self, prompt: str) -> F32:
        return self._model.logits(self._model.tokenize(prompt))


def tally(cases: Iterator[Case], unedited: Unedited, reversal: Reversal, what: str) -> Table:
    """Count the outcomes of cases in which an edit can be seen."""
    table: Table = {}
    for number, case in enumerate(cases):
        if number % 20 == 0:
            show_status(f"{what}: {number:,} cases")
        if not unedited.can_flip(case.question, case.pair.target):
            continue
        reversal.keep(case.question.prompt)
        outcome = unedited.flip(case.question, case.pair.target, case.edit)
        reversal.check(case.question.prompt)
        row = table.setdefault(case.labels, {})
        row.setdefault(case.pair.lengths, Tally()).add(*outcome)
    show_status("")
    return table


def print_table(headers: Sequence[str], table: Table) -> None:
    """As markdown, a column for each length case."""
    columns = [*headers, *LENGTHS.values()]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for labels, row in table.items():
        cells = [cell(row[lengths]) if lengths in row else "" for lengths in LENGTHS.values()]
        print(f"| {' | '.join([*labels, *cells])} |")
    print(flush=True)


def cell(found: Tally) -> str:
    """Shares of the outcomes and the mean probability."""
    neither = found.cases - found.target - found.source
    shares = [f"{100 * count / found.cases:.1f}" for count in (found.target, found.source, neither)]
    return f"{' / '.join(shares)}; {found.probability / found.cases:.2f}"


def measure_collateral(
    unedited: Unedited, pairs: Sequence[Pair], seed: int
) -> tuple[dict[str, Collateral], dict[str, list[int]]]:
    """By length case: what edits everywhere change, and of edits at positions in prompts with two
    countries [prompts, other's answer stays, prompts, source's answer flips]."""
    parts: dict[str, list[Collateral]] = {}
    for number, (pair, found) in enumerate(everywhere(unedited, pairs)):
        show_status(f"collateral: {number:,} of {len(pairs):,} edits")
        parts.setdefault(pair.lengths, []).append(found)
    both = {lengths: [0, 0, 0, 0] for lengths in parts}
    for pair, stays, flips in two_countries(unedited, pairs, seed):
        counts = [1, stays, flips is not None, flips is True]
        both[pair.lengths] = [a + b for a, b in zip(both[pair.lengths], counts, strict=True)]
    show_status("")
    return {lengths: merged(found) for lengths, found in parts.items()}, both


def print_collateral(found: dict[str, Collateral], both: dict[str, list[int]]) -> None:
    """As markdown, a column for each length case, and the names that suffer most."""
    print(f"| | {' | '.join(found)} |\n|---{'|---' * len(found)}|")
    rows: list[tuple[str, Sequence[str]]] = [(fact, [fact]) for fact in FACTS]
    rows += [("all but neighbours", ANSWERED), ("all", FACTS)]
    for label, facts in rows:
        shares = [f"{one.share(facts):.2%}" for one in found.values()]
        print(f"| everywhere: {label} changed | {' | '.join(shares)} |")
    for label, at in (("another's answer stays", 0), ("the source's flips", 2)):
        shares = [f"{both[name][at + 1] / max(1, both[name][at]):.1%}" for name in found]
        print(f"| two countries in a prompt: {label} | {' | '.join(shares)} |")
    for lengths, one in found.items():
        most = [f"{a} -> {b} ({n})" for (a, b), n in one.names.most_common(MOST_NAMES)]
        print(f"\n{lengths}, {one.edits} edits, most changes: {', '.join(most) or 'none'}")


def main() -> None:
    """See the module."""
    args = parse()
    started = time.monotonic()
    with stem_edge.load(args.bundle, context_length=CONTEXT) as model:
        unedited, reversal = Unedited(model), Reversal(model)
        pairs = pairs_of(model, args.pairs, args.seed)
        many = pairs_of(model, None, args.seed) if args.all else pairs
        parts = {
            "schemes": (("scheme", "scope"), by_scheme(model, many)),
            "layers": (("layers",), by_layers(model, pairs)),
            "facts": (("fact", "name"), by_fact(model, pairs, args.seed)),
            "choices": (("scheme", "choice"), by_choice(model, pairs)),
        }
        tables = {}
        print(LEGEND + "\n")
        for name, (headers, cases) in parts.items():
            tables[name] = tally(cases, unedited, reversal, name)
            print_table(headers, tables[name])
        few = pairs_of(model, args.edits, args.seed)
        found, both = measure_collateral(unedited, few, args.seed)
    if found:
        print_collateral(found, both)
    print(f"\nLogits as before, bit by bit: {reversal.equal:,} of {reversal.checked:,} edits")
    print(f"{len(many):,} pairs, {time.monotonic() - started:.0f} s")
    if args.json:
        write(args.json, tables, found, both, reversal)


def write(
    path: Path,
    tables: dict[str, Table],
    found: dict[str, Collateral],
    both: dict[str, list[int]],
    reversal: Reversal,
) -> None:
    """Every count, as JSON."""
    report: dict[str, Any] = {
        name: [
            {"labels": labels, "lengths": lengths} | vars(counts)
            for labels, row in table.items()
            for lengths, counts in row.items()
        ]
        for name, table in tables.items()
    }
    report["collateral"] = {
        lengths: vars(one) | {"names": [[*names, n] for names, n in one.names.most_common()]}
        for lengths, one in found.items()
    }
    report["two_countries"] = both
    report["reversal"] = {"checked": reversal.checked, "equal": reversal.equal}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", nargs="?", type=Path, default=DEMO, metavar="BUNDLE")
    pairs = "pairs of each length case (default 150)"
    parser.add_argument("--pairs", type=int, default=150, metavar="COUNT", help=pairs)
    every = "all pairs in the table by scheme; takes half an hour"
    parser.add_argument("--all", action="store_true", help=every)
    edits = "edits of each length case to look for other changes (default 40)"
    parser.add_argument("--edits", type=int, default=40, metavar="COUNT", help=edits)
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every count there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
