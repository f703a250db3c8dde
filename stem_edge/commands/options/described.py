"""Options of commands that are keywords of a function: its docstring is their help."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

POSITIONAL = ("bundle", "checkpoint", "out")
_ENTRY = re.compile(r"(\w+(?:, \w+)*)(?: \(([^)]+)\))?: (.*)")


class Keyword(NamedTuple):
    """What a docstring says of a keyword."""

    text: str
    default: str  # "" if it says nothing of it
    only: str  # the engine that it is for, or ""

    def help(self) -> str:
        """Return the first sentence for a command, with names of other options as they are typed."""
        sentence = re.split(r"\.(?: |$)", self.text, maxsplit=1)[0]
        only = f"on {self.only}: " if self.only else ""
        default = f" (default: {self.default.rstrip('.')})" if self.default else ""
        return re.sub(r"`(\w+)`", lambda name: option_of(name[1]), f"{only}{sentence}{default}")


def option_of(name: str) -> str:
    """Return how a keyword is typed."""
    return name.upper() if name in POSITIONAL else "--" + name.replace("_", "-")


def keywords(function: Callable[..., object]) -> dict[str, Keyword]:
    """Read a docstring's list of keywords: "name: text. Default: text.", with further lines indented.

    Without docstrings (python -OO) the result is empty.
    """
    found: dict[str, Keyword] = {}
    for entry in re.split(r"\n(?! )", inspect.getdoc(function) or ""):
        if (match := _ENTRY.fullmatch(" ".join(entry.split()))) is not None:
            names, only, text = match.groups()
            text, _, default = text.partition(" Default: ")
            found.update(dict.fromkeys(names.split(", "), Keyword(text, default, only or "")))
    return found


def add_described(
    group: argparse._ActionsContainer,
    function: Callable[..., object],
    settings: dict[str, dict[str, Any]],
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Declare options from settings of argparse by keyword, described by a function's docstring.

    defaults: by keyword. Default: the function's own.
    """
    texts = keywords(function)
    if defaults is None:
        parameters = inspect.signature(function).parameters
        defaults = {name: parameters[name].default for name in settings}
    for name, setting in settings.items():
        said = texts[name].help() if name in texts else None
        given: dict[str, Any] = {"help": said, "dest": name, "default": defaults[name]} | setting
        flags: Sequence[str] = given.pop("flags", (option_of(name),))
        group.add_argument(*flags, **given)


def values_of(args: argparse.Namespace, function: Callable[..., object]) -> dict[str, Any]:
    """Return the values of those options that are keywords of a function."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in names}
