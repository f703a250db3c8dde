"""Write the tables of options in docs/ from the docstrings that describe them.

python tools/options_table.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from stem_edge.commands.bundles.export import SETTINGS
from stem_edge.commands.options.described import keywords, option_of
from stem_edge.export import export_bundle
from stem_edge.runtime import SamplingParams, load

DOCS = Path(__file__).parents[1] / "docs"
TABLES: tuple[tuple[str, Callable[..., object]], ...] = (
    ("python.md", SamplingParams),
    ("python.md", load),
    ("export.md", export_bundle),
)


def table(function: Callable[..., object]) -> str:
    """Return a table in Markdown with a line for each keyword of a function."""
    lines = ["| option | meaning | default |", "|---|---|---|"]
    for name, keyword in keywords(function).items():
        only = f" ({keyword.only})" if keyword.only else ""
        if function is export_bundle:  # on the page of the command, as it is typed
            if name not in SETTINGS:
                continue
            name = SETTINGS[name].get("flags", [option_of(name)])[-1]
        lines += [f"| `{name}`{only} | {keyword.text} | {keyword.default.rstrip('.')} |"]
    return "\n".join(lines)


def with_table(page: str, function: Callable[..., object]) -> str:
    """Return a page of docs/ with the table between its two marks."""
    marks = rf"(?<=<!-- options of {function.__name__} -->\n).*?(?=<!-- end -->)"
    return re.sub(marks, lambda _: table(function) + "\n", page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, function in TABLES:
        path = DOCS / name
        path.write_text(with_table(path.read_text("utf-8"), function), "utf-8")
