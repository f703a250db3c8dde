"""Options of commands that are keywords of a function."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def option_of(name: str) -> str:
    """Return how a keyword is typed."""
    return "--" + name.replace("_", "-")


def add_keywords(
    group: argparse._ActionsContainer,
    settings: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, object],
) -> None:
    """Declare options from settings of argparse and defaults by keyword."""
    for name, setting in settings.items():
        given: dict[str, Any] = {"dest": name, "default": defaults[name], **setting}
        flags: Sequence[str] = given.pop("flags", (option_of(name),))
        group.add_argument(*flags, **given)


def values_of(args: argparse.Namespace, function: Callable[..., object]) -> dict[str, Any]:
    """Return the values of those options that are keywords of a function."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in names}
