"""Measure whether the tests notice mistakes: sampled mutants, and commits whose package half is undone.

    pip install '.[fuzz]'
    python tools/proof.py mutants build/mutants.jsonl --each 20    # a seeded sample for each room
    python tools/proof.py commits build/commits.jsonl --count 60   # the newest that changed tests and code

A mutant changes one operator, number or keyword of a file in the work tree, so processes that tests start run it, too.
Its room's tests run, then the black-box suite, until one fails. A commit is undone in the package alone: its own tests
or the black-box suite must fail. Both take hours, append a line of JSON a case, and go on where they were interrupted.
The work tree must be clean; it is restored after each case.

tools/proofs has samples of 2026-11-29 with reasons for what went unnoticed: "before" and after tests were added, in the
commit "tree". Its mutants also delete statements; first ran the tests that cover a line, then up to 46 s of others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

PACKAGE = ("stem_edge", "export", "runtime")
TESTS = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-m", "not slow"]
BLACK_BOX = "tests/blackbox"
SECONDS = 900  # a mutant that runs longer is killed: it never ends
NONE = 5  # pytest's status where all tests are slow
REVERT = ["git", "apply", "-R", "--3way", "-"]
# One kind of change for each operator of the language. Others nearly always fail at once, or change nothing.
OPERATORS = re.compile(
    "AddNot|Number|AndWith|OrWith|FalseWith|TrueWith|BreakWith|ContinueWith|ZeroIter|Delete_(Not|USub)|"
    "_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Add_Sub|Sub_Add|Mul_Add|FloorDiv_Mul|Div_Mul|Mod_Mul)$"
)


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    operator: str
    occurrence: int


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Yield each folder that has modules, with its modules."""
    for top in PACKAGE:
        for folder in sorted({path.parent for path in Path(top).rglob("*.py")}):
            yield str(folder), sorted(folder.glob("*.py"))


def mutants(files: list[Path]) -> Iterator[Mutant]:
    """Yield all mutants of some modules."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    for file in files:
        nodes = list(ast_nodes(get_ast(file.read_text("utf-8"))))
        for name in sorted(operator_names()):
            if OPERATORS.search(name):
                operator = get_operator(name)()
                count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
                yield from (Mutant(str(file), name, number) for number in range(count))


def sampled(room: str | None, each: int, seed: int) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield the name of each sampled mutant, and what tells whether it is killed."""
    for name, files in rooms():
        if room in (None, name):
            found = list(mutants(files))
            for mutant in random.Random(f"{seed} {name}").sample(found, min(each, len(found))):
                yield json.dumps(mutant), partial(killed, mutant, name)


def killed(mutant: Mutant, room: str) -> bool:
    """Return True if tests fail with a mutant. Exits if they fail without it."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    tests = (f"tests/{room}", BLACK_BOX)
    if fails_unchanged(tests):
        sys.exit(f"proof: {' '.join(tests)}: fails without a mutant, too")
    with use_mutation(Path(mutant.file), get_operator(mutant.operator)(), mutant.occurrence):
        return any(fails([one]) for one in tests)  # most are killed before the second is collected


@cache
def fails_unchanged(tests: Sequence[str]) -> bool:
    return fails(tests)


def undone(count: int) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield the newest commits that changed tests and at most three modules, and what tells whether tests notice."""
    log = git("log", "--format=%H", "--no-merges").split()
    for commit in log:
        changed = git("show", "--format=", "--name-only", commit).split()
        code = [name for name in changed if name.split("/")[0] in PACKAGE and name.endswith(".py")]
        tests = [n for n in changed if Path(n).name.startswith("test_") and Path(n).exists()]
        if tests and 0 < len(code) <= 3 and (patch := reverting(commit, code)):
            yield commit, partial(notices, patch, tests)
            if not (count := count - 1):
                return


def reverting(commit: str, code: list[str]) -> str:
    """Return the patch of a commit's package half, or nothing where it no longer applies."""
    patch = git("show", "--format=", "--full-index", commit, "--", *code)
    fits = subprocess.run(REVERT, input=patch, text=True, capture_output=True, check=False)
    changes = git("diff", "HEAD", "--stat")
    git("reset", "--hard", "--quiet")
    return "" if fits.returncode or not changes else patch


def notices(patch: str, tests: list[str]) -> bool:
    """Return True if tests fail without a patch."""
    subprocess.run(REVERT, input=patch, text=True, capture_output=True, check=True)
    try:
        return any(fails([one]) for one in (*tests, BLACK_BOX))
    finally:
        git("reset", "--hard", "--quiet")


def fails(tests: Sequence[str]) -> bool:
    """Run tests; return True if one fails, or they never end, or cannot begin."""
    there = [name for name in tests if Path(name).exists()]
    try:
        done = subprocess.run([*TESTS, *there], capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return True
    return bool(there) and done.returncode not in (0, NONE)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main(arguments: list[str] | None = None) -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("proof", choices=("mutants", "commits"))
    parser.add_argument("results", type=Path, help="file of results, to which this appends")
    parser.add_argument("--room", metavar="FOLDER", help="mutants of this folder alone")
    parser.add_argument("--each", type=int, default=20, help="mutants of a room (20)")
    parser.add_argument("--count", type=int, default=60, help="commits (60)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if git("status", "--porcelain", "--untracked-files=no"):
        parser.error("the work tree has changes; commit them first, because this edits files")
    done = args.results.read_text().splitlines() if args.results.exists() else []
    results = {line["case"]: line["noticed"] for line in map(json.loads, done)}
    cases = (
        sampled(args.room, args.each, args.seed) if args.proof == "mutants" else undone(args.count)
    )
    with args.results.open("a") as file:
        for case, notice in cases:
            if case not in results:
                results[case] = notice()
                print(json.dumps({"case": case, "noticed": results[case]}), file=file, flush=True)
    print(f"noticed: {sum(results.values())} of {len(results)}")


if __name__ == "__main__":
    main()
