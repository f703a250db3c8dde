"""Whether the tests notice mistakes: makes them, one at a time, in modules on the trust boundary.

    python tools/mutate.py                              # all of tools/boundary.py, hours
    python tools/mutate.py stem_edge/bundle.py --sample 50
    python tools/mutate.py --sample 40 --jobs 2 --json build/mutants.json

A change of one operator, number, condition or statement is a mutant; it is killed if a test of its
module fails or takes too long. Prints those that survive. Tests that reach the changed line run first,
then, if none fails, all of the module's. Linux and macOS: children are forked.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from boundary import ROOT, modules, tests_of
from mutate_equivalent import EQUIVALENT
from mutate_operators import Mutant, mutants
from mutate_run import (
    Outcome,
    Prepared,
    Tracer,
    copy_tree,
    enter,
    replace_module,
    run_tests,
)

BASELINE_SECONDS = 900.0
LEAST_SECONDS = 10.0  # that a mutant's tests may take, whatever they took before
SLACK = 6.0  # times what they took before
MOST_SELECTED = 40  # tests that run first


class Result(msgspec.Struct):
    """How one mutant ended."""

    place: str  # file:line
    change: str
    source: str  # of the line
    outcome: Outcome


class Baseline(msgspec.Struct):
    """What the tests of a module do when nothing is changed."""

    lines: dict[str, list[int]]  # test -> lines of the module that it reaches; "" -> importing
    seconds: dict[str, float]
    modules: list[str]

    def reaching(self, line: int) -> list[str]:
        """Tests that reach a line, quickest first."""
        found = [test for test, lines in self.lines.items() if test and line in lines]
        return sorted(found, key=lambda test: self.seconds.get(test, 0.0))[:MOST_SELECTED]


def measure(module: str, tests: list[str], folder: Path) -> Baseline:
    """Run the tests of a module once; they must pass."""
    out = folder / "baseline.json"
    tracer = Tracer((folder / module).resolve(), out)
    outcome = run_tests(tests, BASELINE_SECONDS, tracer, _tried(folder))
    if outcome != "survived":
        raise SystemExit(f"{module}: its tests do not pass without a change: {' '.join(tests)}")
    return msgspec.json.decode(out.read_bytes(), type=Baseline)


def _tried(folder: Path) -> Prepared:
    """Trying ggml takes longer than most tests; it is tried once."""
    return Prepared("tried_ggml", folder / "tried")


def try_mutant(
    mutant: Mutant, tree: ast.Module, module: Path, run: list[list[str]], seconds: float
) -> Outcome:
    """Run the lists of tests, one after the other, until one fails."""
    folder, file = module.parents[1], module.resolve()
    undo = mutant.apply()
    try:
        replace_module(file, ast.unparse(tree))
    finally:
        undo()
    for tests in run:
        if (outcome := run_tests(tests, seconds, _tried(folder))) != "survived":
            return outcome
    return "survived"


def try_module(module: str, chosen: list[int] | None, folder: Path) -> list[Result]:
    """Try the mutants of a module of these numbers, or all; in a copy of the tree."""
    tests = tests_of(module)
    source = (ROOT / module).read_text("utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    print(f"{module}: its tests, unchanged and watched", file=sys.stderr, flush=True)
    baseline = measure(module, tests, folder)
    for name in baseline.modules:
        if name not in sys.modules and not name.startswith("_"):
            with contextlib.suppress(Exception):  # then each child imports it
                importlib.import_module(name)
    started = time.monotonic()
    if run_tests(tests, BASELINE_SECONDS, _tried(folder)) != "survived":
        raise SystemExit(f"{module}: its tests fail the second time")
    seconds = max(LEAST_SECONDS, SLACK * (time.monotonic() - started))
    results = []
    all_mutants = mutants(tree)
    print(f"{module}: {len(chosen or all_mutants)} mutants", file=sys.stderr, flush=True)
    for number in range(len(all_mutants)) if chosen is None else chosen:
        mutant = all_mutants[number]
        line = lines[mutant.line - 1].strip()
        if (module, line, mutant.change) in EQUIVALENT:
            continue
        first = baseline.reaching(mutant.line)
        outcome = try_mutant(
            mutant, tree, folder / module, [first, tests] if first else [tests], seconds
        )
        results.append(Result(f"{module}:{mutant.line}", mutant.change, line, outcome))
        if outcome == "survived":
            print(f"{module}:{mutant.line}: {mutant.change}: {line}", flush=True)
    return results


def in_process(module: str, chosen: list[int] | None) -> list[Result]:
    """The same in a process of its own, which imports what this module's tests need."""
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=scratch, prefix="mutate-") as name:
        folder = Path(name).resolve()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                enter(copy_tree(folder))
                results = try_module(module, chosen, folder)
                (folder / "results.json").write_bytes(msgspec.json.encode(results))
                code = 0
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        os.waitpid(pid, 0)
        path = folder / "results.json"
        if not path.exists():
            return [Result(module, "", "", "broken")]
        return msgspec.json.decode(path.read_bytes(), type=list[Result])


def choose(names: list[str], sample: int | None, seed: int) -> dict[str, list[int] | None]:
    """Numbers of the mutants of each module; None: all."""
    rng, chosen = random.Random(seed), dict[str, list[int] | None]()
    for name in names:
        count = len(mutants(ast.parse((ROOT / name).read_text("utf-8"))))
        some = sample is not None and sample < count
        chosen[name] = sorted(rng.sample(range(count), sample or 0)) if some else None
    return chosen


def summary(name: str, results: list[Result]) -> dict[str, Any]:
    """Counts and score of some results."""
    counts = Counter(result.outcome for result in results)
    tried = sum(counts.values()) - counts["broken"]
    dead = counts["killed"] + counts["timeout"]
    score = 100 * dead / tried if tried else 0.0
    print(
        f"{name:<36}{tried:>6} mutants{counts['survived']:>6} survived{score:>8.1f} %", flush=True
    )
    return {"mutants": tried, "score": score, **{str(k): n for k, n in counts.items()}}


def main() -> int:
    """Parse, run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="files (all of the boundary)")
    parser.add_argument("--sample", type=int, metavar="N", help="mutants of each module, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=1, help="modules at a time (1)")
    parser.add_argument(
        "--least", type=float, default=0.0, metavar="PERCENT", help="that must be killed (0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result")
    args = parser.parse_args()
    if unknown := set(args.modules) - set(modules()):
        parser.error(f"{min(unknown)} is not on the boundary; one of: {', '.join(modules())}")
    if args.jobs < 1 or (args.sample is not None and args.sample < 1):
        parser.error("--sample and --jobs must be above 0")
    chosen = choose(args.modules or modules(), args.sample, args.seed)
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(chosen, pool.map(in_process, chosen, chosen.values()), strict=True))
    scores = {name: summary(name, results) for name, results in found.items()}
    total = summary("total", [result for results in found.values() for result in results])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        every = [msgspec.to_builtins(r) for results in found.values() for r in results]
        args.json.write_text(
            json.dumps({"total": total, "modules": scores, "mutants": every}, indent=1)
        )
    return 0 if total["score"] >= args.least and total["mutants"] else 1


if __name__ == "__main__":
    sys.exit(main())
