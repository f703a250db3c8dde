"""Write the table of options in docs/export.md from the docstring that describes them.

python tools/options_table.py
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from stem_edge.commands.bundles.export import SETTINGS
from stem_edge.commands.options.described import keywords, option_of
from stem_edge.export import export_bundle

PAGE = Path(__file__).parents[1] / "docs" / "export.md"


def table() -> str:
    """Return a table in Markdown with a line for each option of an export, as it is typed."""
    lines = ["| option | meaning | default |", "|---|---|---|"]
    for name, keyword in keywords(export_bundle).items():
        if name in SETTINGS:
            option = SETTINGS[name].get("flags", [option_of(name)])[-1]
            lines += [f"| `{option}` | {keyword.text} | {keyword.default.rstrip('.')} |"]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the text of the page with the table between its two marks."""
    marks = r"(?<=<!-- options of export_bundle -->\n).*?(?=<!-- end -->)"
    return re.sub(marks, lambda _: table() + "\n", text, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
