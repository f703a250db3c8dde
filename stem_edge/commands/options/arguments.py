"""Command-line parsing: help, errors, hints, and texts from files."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from stem_edge.errors import InputError
from stem_edge.foreign import replacement
from stem_edge.shown import shown

MORE = "(docs/run.md)"  # help of options that few people need
# llama.cpp's options that name a model -> prefix of the model's name. Here the model is positional.
MODEL = {"-m": "", "--model": "", "-hf": "hf:", "-hfr": "hf:", "--hf-repo": "hf:"}


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter with one line for each option, or for several options with the same help."""

    def __init__(self, prog: str) -> None:
        width = min(80, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=27, width=width)
        self._together = dict[argparse.Action, list[argparse.Action]]()

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """Add options to the help. Neighbours with the same help text share one entry."""
        for _, found in groupby(actions, key=lambda action: action.help or action):
            together = list(found)
            self._together[together[0]] = together
            self.add_argument(together[0])

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return ", ".join(self._typed(one) for one in self._together.get(action, [action]))

    def _typed(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]")
        long = next(name for name in action.option_strings if name.startswith("--"))
        short = [name for name in action.option_strings if len(name) == 2]
        names = ", ".join([*short, long])
        return names if action.nargs == 0 else f"{names} {self._format_args(action, action.dest)}"

    def _format_action(self, action: argparse.Action) -> str:
        """Format an entry: options and help on one line if they fit, else wrapped at spaces."""
        if action.choices is not None and isinstance(action.choices, dict):
            return super()._format_action(action)  # the list of commands
        line = f"  {self._format_action_invocation(action):{self._max_help_position - 4}}  "
        inside = max(self._max_help_position, 4) if len(line) <= self._max_help_position else 4
        text = line + (self._expand_help(action) if action.help else "")
        wrapped = textwrap.wrap(
            text, self._width, subsequent_indent=" " * inside, break_on_hyphens=False
        )
        return "\n".join(wrapped) + "\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap the paragraphs of a description; each indented line is wrapped on its own."""
        lines, text = [], re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text)
        for line in text.splitlines():
            begin = len(line) - len(line.lstrip())
            inside = " " * (begin + 2 * bool(begin))
            lines += textwrap.wrap(line, width, subsequent_indent=inside, break_on_hyphens=False)
            lines += [""] * (not line)
        return "".join(f"{indent}{line}\n" for line in lines)

    def _format_usage(self, usage: str | None, actions: Any, groups: Any, prefix: Any) -> str:
        """Return a usage line with `[options]` and the names of the positional arguments."""
        if usage is None:
            positional = [one for one in actions if not one.option_strings]
            names = (self._format_args(one, one.metavar or one.dest) for one in positional)
            words = " ".join(["usage: %(prog)s [options]", *names]) % {"prog": self._prog}
            return textwrap.fill(words, self._width, subsequent_indent="  ") + "\n\n"
        return super()._format_usage(usage, actions, groups, prefix)


class Parser(argparse.ArgumentParser):
    """Argument parser with help on one screen and errors of one line."""

    def __init__(self, prog: str, **options: Any) -> None:
        options |= {"formatter_class": Help, "allow_abbrev": False, "add_help": False}
        super().__init__(prog=prog, **options)
        self._positionals = self._optionals  # one section for positional arguments and options
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse options and arguments in any order. Accepts -m MODEL, too, as llama.cpp does."""
        words = list(words)
        end = words.index("--") if "--" in words else len(words)
        for at, word in enumerate(words[:end]):
            name, equals, given = word.partition("=")
            known = self._option_string_actions
            if word[:1] == "-" and name not in known and (hint := replacement(name, known)):
                self.error(f"there is no {name} here; {hint}")
            if name in MODEL and (equals or at + 1 < len(words)):
                model, rest = (given, at + 1) if equals else (words[at + 1], at + 2)
                words = [MODEL[name] + model, *words[:at], *words[rest:]]
        return self.parse_intermixed_args(words)

    def error(self, message: str) -> NoReturn:
        """Print the message, and the most similar option if there is one. Exit with status 2."""
        if bad := re.search("invalid (int|float) value: '", message):
            wanted, found = {"int": "whole "}.get(bad[1], ""), shown(message[bad.end() : -1])
            message = f"{message[: bad.start()]}expected a {wanted}number, found {found}"
        message = re.sub(r"^(argument (-\w/)?--[\w-]+)(/-+[\w-]+)+", r"\1", message)  # no synonyms
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = get_close_matches(unknown[1], known, 1, 0.8) if unknown else []
        hint = "".join(f"did you mean {name}? " for name in near)
        self.exit(2, f"{self.prog}: {message}; {hint}see {self.prog} --help\n")


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


def read_text(path: Path | None, what: str, most: int) -> str:
    """Return the text of a file, or the text of stdin if `path` is None. Raises InputError.

    what: noun for the text in errors. most: limit on its characters.
    """
    place = path or "stdin"
    try:
        with nullcontext(sys.stdin) if path is None else path.open(encoding="utf-8") as file:
            text = str(file.read(most + 1))
    except OSError as error:
        raise InputError(f"{place}: cannot read ({error.strerror}); give a {what} file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not valid UTF-8 ({error}); give the {what} as UTF-8") from None
    if len(text) > most:
        raise InputError(f"{place}: more than {most:,} characters; shorten the {what}")
    return text
