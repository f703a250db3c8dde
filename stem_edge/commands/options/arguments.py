"""Help and errors of every command, texts from files, and the command line that repeats one."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from stem_edge.bundle.manifest import BACKBONES
from stem_edge.errors import InputError

# Engine -> kind of its backbone, the choice of `export`; every command takes both names.
BACKBONE_FOR: dict[str, str] = {engine: backbone.option for engine, backbone in BACKBONES.items()}


def engine_name(name: str) -> str:
    """Return the engine that has this name or runs this kind of backbone."""
    return next((engine for engine, backbone in BACKBONE_FOR.items() if backbone == name), name)


TOGETHER = "\0"  # stands for a space at which no line ends


class Help(argparse.RawDescriptionHelpFormatter):
    """Format help as wide as the terminal, so that commands in it can still be pasted.

    Paragraphs and last columns wrap; a long command goes on in the next line after a backslash.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap the help of an option, whose words may be options, at spaces alone."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            in_paragraph = line[:1].strip() and lines and lines[-1][:1].strip()
            in_last_column = line.startswith(" " * 8)
            if in_paragraph or in_last_column:
                lines[-1] += f" {line.strip()}"
            else:
                lines.append(line)
        return "\n".join(indent + part for line in lines for part in _wrapped(line, width))


class Rare(str):
    """Help of an option that --help leaves out, and --help-all shows."""

    __slots__ = ()


class Parser(argparse.ArgumentParser):
    """Argument parser with errors of one line, like the commands' own errors."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, formatter_class=Help, **options)
        self._all = self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)

    def format_usage(self) -> str:
        """Return the usage, without rare options."""
        with self._usual():
            return super().format_usage()

    def format_help(self) -> str:
        """Return the help, without rare options."""
        with self._usual():
            return super().format_help()

    def format_all(self) -> str:
        """Return the help of all options."""
        return super().format_help()

    @contextmanager
    def _usual(self) -> Iterator[None]:
        """Hide rare options, if there are some, and show the option that shows them."""
        rare = {action: action.help for action in self._actions if isinstance(action.help, Rare)}
        if rare:
            self._all.help = f"show {len(rare)} rarer options, too, and exit"
        for action in rare:
            action.help = argparse.SUPPRESS
        try:
            yield
        finally:
            for action, said in rare.items():
                action.help = said

    def error(self, message: str) -> NoReturn:
        """Print the message, with the option that may be meant, and end the process with status 2."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        near = get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        hint = "".join(f"did you mean {name}? " for name in near)
        self.exit(2, f"{self.prog}: {message}; {hint}see {self.prog} --help\n")


class _HelpAll(argparse.Action):
    """Prints the help of all options, and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        text = parser.format_all() if isinstance(parser, Parser) else parser.format_help()
        print(text, end="")
        parser.exit()


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    column = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
    if column or line[:1].strip():
        indent = " " * len(column[0] if column else "")
        return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    together = re.sub(r"( --?[a-z-]+) (?=[^-])", rf"\1{TOGETHER}", line)  # options with values
    parts = textwrap.wrap(together, width - 2, subsequent_indent=" " * 6, break_on_hyphens=False)
    return " \\\n".join(parts).replace(TOGETHER, " ").split("\n")


def with_options(parser: argparse.ArgumentParser, message: str) -> str:
    """Return an error message with names of Python keywords replaced by this command's options."""
    options = {
        action.dest: option
        for action in parser._actions
        for option in reversed(action.option_strings)
        if option.startswith("--")
    }
    # Names without an underscore are English words, so they must stand at the beginning, like
    # "slots is 0"; otherwise "the memory of this machine" would become "the --memory of".
    codes = "|".join(name for name in options if "_" in name) or "(?!)"
    names = rf"^({'|'.join(options)})(?=:|,| is | belongs? )"
    pattern = rf"{names}|(?<![\w/.\\'\"-])({codes})(?:=True)?(?![\w/])"
    return re.sub(pattern, lambda found: options[found[1] or found[2]], message)


def own_command() -> str:
    """Return how stem-edge was started, for printed commands that work when pasted."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m stem_edge"
    found = started.stem != "stem-edge" or shutil.which("stem-edge")
    return "stem-edge" if found else shlex.quote(sys.argv[0])


def read_text(path: Path | None, what: str, most: int) -> str:
    """Return the text of a file, or of stdin for None, of at most `most` characters.

    Raises InputError, which says `what` it is.
    """
    place = path or "stdin"
    try:
        with nullcontext(sys.stdin) if path is None else path.open(encoding="utf-8") as file:
            text = str(file.read(most + 1))
    except OSError as error:
        raise InputError(f"{place}: cannot read ({error.strerror}); give another file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not valid UTF-8 ({error}); give the {what} as UTF-8") from None
    if len(text) > most:
        raise InputError(f"{place}: more than {most:,} characters; shorten the {what}")
    return text
