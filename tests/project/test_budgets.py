"""Sizes of the tree: none grows, and limits only fall."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple, get_type_hints

import pytest
from installed import ROOT

import stem_edge
from stem_edge.commands import main
from stem_edge.commands.options.arguments import Parser
from stem_edge.runtime.backends.keywords import LoadKeywords

ENGINES = {"onnxruntime", "ggml"}
FORMATS = {"BackboneFormat", "GgufFormat"}
# Own modules of a process that loads a local bundle and generates, as at any start but a bundle's first.
PLAIN_RUN = """
import json, sys
import stem_edge
with stem_edge.load(sys.argv[1], cache_dir=sys.argv[2]) as model:
    model.generate_text("The", max_new_tokens=2)
print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "stem_edge"]))
"""


class Module(NamedTuple):
    """A file of the package, and the name that it is imported by."""

    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return parsed(self.path)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def modules() -> Iterator[Module]:
    for folder, package in (
        ("stem_edge", "stem_edge"),
        ("export", "stem_edge.export"),
        ("runtime", "stem_edge.runtime"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "stem_edge" or parts[0] not in ("export", "runtime"):
                yield Module(".".join([package, *parts]).removesuffix(".__init__"), path)


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def lines_in(folder: str) -> int:
    return lines(list((ROOT / folder).rglob("*.py")))


def package_lines() -> int:
    return lines([module.path for module in modules()])


def fullest_room() -> int:
    return max(Counter(module.path.parent for module in modules()).values())


def asks_for_engine(node: ast.AST) -> bool:
    """Tell whether code takes a way that depends on the engine, or the form of its backbone."""
    if isinstance(node, ast.Compare):
        inside = [one for part in (node.left, *node.comparators) for one in ast.walk(part)]
        return any(isinstance(one, ast.Constant) and one.value in ENGINES for one in inside)
    if isinstance(node, ast.Dict):
        return any(isinstance(key, ast.Constant) and key.value in ENGINES for key in node.keys)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return any(
            isinstance(one, ast.Name) and one.id in FORMATS for one in ast.walk(node.args[1])
        )
    return False


def places_that_ask_for_engine() -> int:
    own = [ROOT / "runtime" / "backends" / name for name in ENGINES]
    outside = [m for m in modules() if not any(m.path.is_relative_to(folder) for folder in own)]
    return sum(asks_for_engine(node) for module in outside for node in ast.walk(module.tree))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports for itself or for type checkers, but not in its functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
            yield str(node.module)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node)


def modules_in_a_circle() -> int:
    """Return 0 if there is no circle; the front door names all modules."""
    names = {module.name for module in modules()} - {"stem_edge"}
    graph = {m.name: names.intersection(imports(m.tree)) for m in modules() if m.name in names}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return len(error.args[1]) - 1
    return 0


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cache")
    bundle = ROOT / "stem_edge" / "demo_model"
    for _ in range(2):  # the first load writes what later ones read
        command = [sys.executable, "-c", PLAIN_RUN, str(bundle), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Path(file) for file in json.loads(done.stdout) if file]


class Budget(NamedTuple):
    """A figure of the tree and its limit, which is only ever lowered."""

    figure: Callable[[], int]
    limit: int


SLACK = 100  # a figure that falls further below its limit takes the limit with it


def package_classes() -> int:
    return sum(isinstance(node, ast.ClassDef) for m in modules() for node in ast.walk(m.tree))


def actions() -> Iterator[argparse.Action]:
    """Yield the options of all commands."""
    for name in main.COMMANDS:
        parser = Parser(name)
        main._import(name).add_arguments(parser)
        yield from (one for one in parser._actions if one.option_strings and one.dest != "help")


def flags() -> int:
    """Count options of the command line, each once; a flag and its --no- form are one."""
    return len({next(s for s in one.option_strings if s.startswith("--")) for one in actions()})


def options_of_export() -> int:
    return len(inspect.signature(stem_edge.export_bundle).parameters) - len(("checkpoint", "out"))


BUDGETS = {
    "package, lines": Budget(package_lines, 39_545),
    "tools, lines": Budget(lambda: lines_in("tools"), 3_354),
    "tests, lines": Budget(lambda: lines_in("tests"), 35_064),
    "measuring, lines": Budget(lambda: lines_in("stem_edge/apps/measuring"), 1_610),
    "classes": Budget(package_classes, 342),
    "commands": Budget(lambda: len(main.COMMANDS), 15),
    "flags": Budget(flags, 66),
    "options of load": Budget(lambda: len(get_type_hints(LoadKeywords)), 16),
    "options of export": Budget(options_of_export, 12),
    "files in a room": Budget(fullest_room, 15),
    "public names": Budget(lambda: len(stem_edge.__all__), 19),
    "places that ask which engine it is": Budget(places_that_ask_for_engine, 0),
    "circles between modules": Budget(modules_in_a_circle, 0),
}
# Of a process that loads a local bundle on onnxruntime's CPU, and generates.
PLAIN_MODULES = Budget(int, 75)
PLAIN_LINES = Budget(int, 8_424)


def test_the_tree_does_not_grow() -> None:
    for name, budget in BUDGETS.items():  # in one process, which parses the modules once
        check(name, budget.figure(), budget.limit)


def test_a_plain_run_imports_no_more(plain_run: list[Path]) -> None:
    check("PLAIN_MODULES", len(plain_run), PLAIN_MODULES.limit)
    check("PLAIN_LINES", lines(plain_run), PLAIN_LINES.limit)


def check(name: str, figure: int, limit: int) -> None:
    assert figure <= limit, f"{name}: {figure} of {limit}; take away elsewhere what this adds"
    assert figure >= limit - SLACK, f"{name}: write {figure} as the limit, in place of {limit}"


def test_the_core_is_small() -> None:
    """The files that docs/architecture.md lists as the core."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.split("## The core", 1)[1].split("\n\n")[2]
    core = [ROOT / name for name in re.findall(r"`([\w/]+\.py)`", table)]
    assert len(core) == 14
    assert lines(core) < 3000
