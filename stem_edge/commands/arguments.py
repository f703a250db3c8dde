"""What all commands share: the form of help, options named in errors, lines that can be pasted."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

# An engine -> what `export` calls a backbone for it; commands take both names.
BACKBONE_FOR = {"onnxruntime": "onnx", "ggml": "gguf"}


def engine_name(name: str) -> str:
    """An engine, by its own name or by that of its kind of backbone."""
    return next((engine for engine, backbone in BACKBONE_FOR.items() if backbone == name), name)


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal: paragraphs and last columns wrap, commands go on after `\\`."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            in_paragraph = line[:1].strip() and lines and lines[-1][:1].strip()
            if in_paragraph or line.startswith(" " * 8):  # or in the last column
                lines[-1] += f" {line.strip()}"
            else:
                lines.append(line)
        return "\n".join(indent + part for line in lines for part in _wrapped(line, width))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, formatter_class=Help, **options)

    def error(self, message: str) -> NoReturn:
        """End the process."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    column = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
    if column or line[:1].strip():
        indent = " " * len(column[0] if column else "")
        return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    *parts, last = textwrap.wrap(line, width - 2, subsequent_indent=" " * 6, break_on_hyphens=False)
    return [*(f"{part} \\" for part in parts), last]


def with_options(parser: argparse.ArgumentParser, message: str) -> str:
    """An error in which arguments of Python have the names of this command's options."""
    options = {
        action.dest: option
        for action in parser._actions
        for option in reversed(action.option_strings)
        if option.startswith("--")
    }
    # A name that is an English word, too, is one only where the message begins with it.
    codes = "|".join(name for name in options if "_" in name) or "(?!)"
    names = rf"^({'|'.join(options)})(?=:|,| is | belongs? )"
    pattern = rf"{names}|(?<![\w/.\\'\"-])({codes})(?:=True)?(?![\w/])"
    return re.sub(pattern, lambda found: options[found[1] or found[2]], message)


def own_command() -> str:
    """How this command was started, for lines that work as they stand."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m stem_edge"
    found = started.stem != "stem-edge" or shutil.which("stem-edge")
    return "stem-edge" if found else shlex.quote(sys.argv[0])
