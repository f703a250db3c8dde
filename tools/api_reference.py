"""Write docs/api.md: every public name of stem_edge, from signatures, docstrings and the comments of fields.

python tools/api_reference.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

Every public name of `stem_edge`, and what these return; [python.md](python.md) shows how they are used. Arrays are numpy's, with
their shapes in brackets, where T are tokens and V those of the vocabulary. Sizes are in bytes and times in seconds, unless
a name says otherwise. `python tools/api_reference.py` writes this page from the docstrings.
"""
ENTRY = re.compile(r"(\w+(?:, \w+)*)(?: \(([^)]+)\))?: (.*)", re.DOTALL)
WIDTH = 100
STARS: dict[griffe.ParameterKind | None, str] = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}


class Reference:
    """The package as griffe reads it, without importing it."""

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
        """Return the whole page."""
        functions = [part for one in self.functions for part in (f"### {one.name}", *_of(one))]
        classes = [part for one in self.classes for part in self._of_class(one)]
        returned = [part for one in self._returned() for part in self._of_class(one)]
        rows = [f"| `{one.name}` | {_bases(one)} | {_line(one)} |" for one in self.errors]
        errors = "\n".join(["| error | is a | when |", "|---|---|---|", *rows])
        parts = [HEAD.rstrip(), "## Functions", *functions, "## Classes", *classes]
        parts += ["## What they return and have", *returned]
        return "\n\n".join([*parts, "## Errors", "Of `stem_edge.errors`.", errors]) + "\n"

    def members(self, one: griffe.Class) -> list[griffe.Function | griffe.Attribute]:
        """Public fields, properties and methods of a class and of those that it is made of."""
        found = [self._found(member.path) for member in one.all_members.values()]
        public = [one for one in found if one.name.islower() and not one.name.startswith("_")]
        return [one for one in public if isinstance(one, griffe.Function | griffe.Attribute)]

    def fields(self, one: griffe.Class) -> dict[str, tuple[griffe.Attribute, str]]:
        """Name -> attribute, and what docstrings and comments say of it."""
        found = [each for each in self.members(one) if isinstance(each, griffe.Attribute)]
        said, _ = _read(one, {field.name for field in found})
        return {field.name: (field, said.get(field.name) or _said(field)) for field in found}

    def _returned(self) -> list[griffe.Class]:
        """Further classes of ours that functions and methods take as keywords or return, or fields have."""
        members = [member for one in self.classes for member in self.members(one)]
        found = set[griffe.Class]()
        for typed in (typed for one in [*self.functions, *members] for typed in _types(one)):
            names = [name for name in typed if isinstance(name, griffe.ExprName)]
            paths = [name.canonical_path for name in names]
            own = [self._found(path) for path in paths if path.startswith("stem_edge.")]
            found |= {one for one in own if isinstance(one, griffe.Class)}
        return sorted(found - {*self.classes, *self.errors}, key=lambda one: one.name.lower())

    def _of_class(self, one: griffe.Class) -> Iterator[str]:
        fields = self.fields(one)
        yield f"### {one.name}"
        yield f"`{one.path}`"
        yield _read(one, fields)[1]
        if fields:
            rows = [_row(field, said) for field, said in fields.values()]
            yield "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])
        for method in self.members(one):
            if isinstance(method, griffe.Function):
                yield f"#### {one.name}.{method.name}"
                yield from _of(method)


def _of(function: griffe.Function) -> Iterator[str]:
    """Yield signature, text and parameters of a function."""
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
    if len(text) > WIDTH:
        text = "\n    ".join([f"{function.name}(", *(f"{part}," for part in parts)]) + f"\n){end}"
    return f"```py\n{text}\n```"


def _typed(parameter: griffe.Parameter) -> str:
    star = STARS.get(parameter.kind, "")
    typed = "" if parameter.annotation is None else f": {parameter.annotation}"
    default = "" if star or parameter.default is None else f" = {parameter.default}"
    return f"{star}{parameter.name}{typed}{default}"


def _read(one: griffe.Object, names: Collection[str] | None) -> tuple[dict[str, str], str]:
    """Return what a docstring's lists say of names, and the rest of it. names: None: of any."""
    said, rest = dict[str, str](), list[str]()
    for paragraph in (one.docstring.value if one.docstring else "").split("\n\n"):
        for line in re.split(r"\n(?! )", paragraph):
            entry = ENTRY.fullmatch(text := " ".join(line.split()))
            found = entry[1].split(", ") if entry is not None else []
            if entry is not None and (names is None or set(found) <= set(names)):
                only = f"({entry[2]}) " if entry[2] else ""
                said |= dict.fromkeys(found, only + entry[3])
            else:
                rest.append(text)
        rest.append("\n")
    return said, re.sub(r" ?\n ?", "\n\n", re.sub(r"(\s*\n\s*)+", "\n", " ".join(rest))).strip()


def _line(one: griffe.Object) -> str:
    return " ".join(one.docstring.value.split()) if one.docstring else ""


def _bases(one: griffe.Class) -> str:
    return ", ".join(f"`{base}`" for base in one.bases)


def _said(field: griffe.Attribute) -> str:
    """Return a property's docstring, or the comment behind a field, or else above it."""
    if field.docstring is not None or not isinstance(field.filepath, Path):
        return _line(field)
    lines = field.filepath.read_text("utf-8").splitlines()[: field.endlineno]
    _, mark, behind = lines[-1].partition("  # ")
    before = map(str.strip, lines[-2::-1])
    above = list(takewhile(lambda line: line.startswith("#"), before))
    return behind if mark else " ".join(line.strip("# ") for line in reversed(above))


def _types(one: griffe.Object) -> list[griffe.Expr]:
    """Types that a function returns and of its further keywords, or the type of a field."""
    if isinstance(one, griffe.Function):
        keywords = [each.annotation for each in one.parameters if STARS.get(each.kind) == "**"]
        types = [one.returns, *keywords]
    else:
        types = [one.annotation] if isinstance(one, griffe.Attribute) else []
    return [typed for typed in types if isinstance(typed, griffe.Expr)]


def _row(field: griffe.Attribute, said: str) -> str:
    valued = field.value is not None and "property" not in field.labels
    default = f"`{field.value}`" if valued and field.labels != {"instance-attribute"} else ""
    typed = "" if field.annotation is None else f"`{field.annotation}`"
    cells = (f"`{field.name}`", typed, default, said)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(Reference().page(), "utf-8")
