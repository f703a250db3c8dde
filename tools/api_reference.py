"""Write docs/api.md: public names of stem_edge, with their signatures and descriptions.

python tools/api_reference.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path
from textwrap import dedent

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

The public names of `stem_edge`, and the classes that they return. [python.md](python.md) shows how to use them. Arrays are
numpy's, with their shapes in brackets: T tokens, a vocabulary of V. Sizes are in bytes and times in seconds, unless a name says
otherwise. `python tools/api_reference.py` writes this page from the docstrings.
"""
# Classes that public functions or a Model return.
RETURNED = ("apps.batches.batch.Batch", "bundle.opening.Bundle", "runtime.conversations.conversation.Conversation",
            "runtime.stats.GenerationStats", "runtime.rows.ngram_rows.NgramRows",
            "apps.measuring.quality.quality.Quality", "apps.measuring.runs.results.Report",
            "runtime.rows.table_arrays.Tables")  # fmt: skip
# Members for the package and its tests only, which the page leaves out.
INSIDE = {"Model.chat", "Model.check_grammar", "Model.chosen", "Model.engine", "Model.limit_texts", "Model.stepping",
          "MemoryPlan.computing", "MemoryPlan.measured", "MemoryPlan.more_slots", "NgramRows.counters",
          "Conversation.prompt", "SamplingParams.biases", "SamplingParams.resolved",
          "Tables.kind", "Tables.layout", "Tables.records"}  # fmt: skip
ENTRY = re.compile(r"(\w+(?:, \w+)*)(?: \(([^)]+)\))?: (.*)", re.DOTALL)
WIDTH = 100
STARS: dict[griffe.ParameterKind | None, str] = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}


class Reference:
    """The public names of stem_edge, read by griffe, which does not import the package."""

    def __init__(self) -> None:
        loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
        package = loader.load("stem_edge")
        self._objects = loader.modules_collection
        names = sorted(map(str, package.exports or ()), key=str.lower)
        public = [self._found(f"stem_edge.{name}") for name in names]
        self.errors = list(package["errors"].classes.values())
        self.functions = [one for one in public if isinstance(one, griffe.Function)]
        classes = [one for one in public if isinstance(one, griffe.Class)]
        self.classes = [one for one in classes if one not in self.errors]

    def _found(self, path: str) -> griffe.Object:
        found = self._objects[path]
        return found.final_target if isinstance(found, griffe.Alias) else found

    def page(self) -> str:
        """Return docs/api.md as Markdown."""
        functions = [part for one in self.functions for part in (f"### {one.name}", *_of(one))]
        classes = [part for one in self.classes for part in self._of_class(one)]
        returned = [self._objects[f"stem_edge.{name}"] for name in RETURNED]
        more = [part for one in returned for part in self._of_class(one)]
        rows = [
            f"| `{one.name}` | {', '.join(map(str, one.bases))} | {_line(one)} |"
            for one in self.errors
        ]
        errors = "\n".join(["| error | is a | when |", "|---|---|---|", *rows])
        parts = [HEAD.rstrip(), "## Functions", *functions, "## Classes", *classes]
        parts += ["## Classes that they return", *more]
        return "\n\n".join([*parts, "## Errors", "Of `stem_edge.errors`.", errors]) + "\n"

    def members(self, one: griffe.Class) -> list[griffe.Function | griffe.Attribute]:
        """Return public fields, properties and methods of a class, inherited ones included."""
        found = [self._found(member.path) for member in one.all_members.values()]
        public = [each for each in found if each.name.islower() and each.name[0] != "_"]
        public = [each for each in public if f"{one.name}.{each.name}" not in INSIDE]
        return [one for one in public if isinstance(one, griffe.Function | griffe.Attribute)]

    def fields(self, one: griffe.Class) -> dict[str, tuple[griffe.Attribute, str]]:
        """Return field name -> (attribute, description from a docstring or comment)."""
        found = [each for each in self.members(one) if isinstance(each, griffe.Attribute)]
        said, _ = _read(one, {field.name for field in found})
        return {field.name: (field, said.get(field.name) or _said(field)) for field in found}

    def _of_class(self, one: griffe.Class) -> Iterator[str]:
        fields = self.fields(one)
        yield f"### {one.name}"
        yield _read(one, fields)[1]
        if fields:
            rows = [_row(field, said) for field, said in fields.values()]
            yield "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])
        for method in self.members(one):
            if isinstance(method, griffe.Function):
                yield f"#### {one.name}.{method.name}"
                yield from _of(method)


def _of(function: griffe.Function) -> Iterator[str]:
    """Yield the Markdown of a function: signature, text and parameters."""
    given = [each for each in function.parameters if each.name not in ("self", "cls")]
    yield _signature(function, given)
    more = any(STARS.get(each.kind) == "**" for each in given)
    said, text = _read(function, None if more else {each.name for each in given})
    yield text
    if said:
        yield "\n".join(f"- `{name}`: {entry}" for name, entry in said.items())


def _signature(function: griffe.Function, given: list[griffe.Parameter]) -> str:
    named = [each.kind is griffe.ParameterKind.keyword_only for each in given]
    parts = [_typed(each) for each in given]
    if any(named):
        parts.insert(named.index(True), "*")
    end = "" if function.returns is None else f" -> {function.returns}"
    text = f"{function.name}({', '.join(parts)}){end}"
    if len(text) <= WIDTH:
        return f"`{text}`"
    lines = "".join(f"    {part},\n" for part in parts)
    return f"```py\n{function.name}(\n{lines}){end}\n```"


def _typed(parameter: griffe.Parameter) -> str:
    star = STARS.get(parameter.kind, "")
    typed = "" if parameter.annotation is None else f": {parameter.annotation}"
    default = "" if star or parameter.default is None else f" = {parameter.default}"
    return f"{star}{parameter.name}{typed}{default}"


def _read(one: griffe.Object, names: Collection[str] | None) -> tuple[dict[str, str], str]:
    """Return a docstring's descriptions (name -> text) and other text. names: None: any name."""
    said, paragraphs = dict[str, str](), list[str]()
    for paragraph in (one.docstring.value if one.docstring else "").split("\n\n"):
        lines, entries, rest = paragraph.splitlines(), tuple[str, ...](), list[str]()
        if all(line.startswith("    ") for line in lines):
            paragraphs.append(f"```py\n{dedent(paragraph)}\n```")
            continue
        for line in lines:
            entry = ENTRY.fullmatch(line)
            named = tuple(entry[1].split(", ")) if entry is not None else ()
            goes_on = line[0] == " " or (bool(entries) and not said[entries[0]].endswith("."))
            if entry is not None and (names is None or set(named) <= set(names)) and line[0] != " ":
                entries = named
                said |= dict.fromkeys(named, f"({entry[2]}) {entry[3]}" if entry[2] else entry[3])
            elif entries and goes_on:
                said |= dict.fromkeys(entries, f"{said[entries[0]]} {line.strip()}")
            else:
                rest.append(line.strip())
        paragraphs.append(" ".join(rest))
    return said, "\n\n".join(filter(None, paragraphs))


def _line(one: griffe.Object) -> str:
    return " ".join(one.docstring.value.split()) if one.docstring else ""


def _said(field: griffe.Attribute) -> str:
    """Return the description of a field: its docstring, or the comment behind it or above it."""
    if field.docstring is not None or not isinstance(field.filepath, Path):
        return _line(field)
    lines = field.filepath.read_text("utf-8").splitlines()[: field.endlineno]
    _, mark, behind = lines[-1].partition("  # ")
    before = map(str.strip, lines[-2::-1])
    above = list(takewhile(lambda line: line.startswith("#"), before))
    return behind if mark else " ".join(line.strip("# ") for line in reversed(above))


def _row(field: griffe.Attribute, said: str) -> str:
    valued = field.value is not None and "property" not in field.labels
    default = f"`{field.value}`" if valued and field.labels != {"instance-attribute"} else ""
    typed = "" if field.annotation is None else f"`{field.annotation}`"
    cells = (f"`{field.name}`", typed, default, said)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(Reference().page(), "utf-8")
