"""Options of load on a command line."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from stem_edge.commands.options.loading import add_loading, loading_options


def parsed(*arguments: str) -> argparse.Namespace:
    """Arguments of a command that also has an option with the name of a keyword of load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress", default="an option of the command")
    add_loading(parser)
    return parser.parse_args(arguments)


def test_only_declared_options_are_given_to_load() -> None:
    given = loading_options(parsed("--memory", "1GB", "--sequences", "3", "--provider", "webgpu"))
    assert (given["memory"], given["sequences"]) == ("1GB", 3)
    assert given["provider"] == "webgpu"
    assert "progress" not in given


@pytest.mark.parametrize(
    ("typed", "option", "expected"),
    [
        *[("", "prompt_cache", None), ("--prompt-cache", "prompt_cache", True)],
        *[("--prompt-cache=DIR", "prompt_cache", "DIR"), ("", "speculate", "auto")],
        *[("--speculate auto", "speculate", "auto"), ("--speculate on", "speculate", True)],
        *[("--speculate off", "speculate", False), ("--speculate 3", "speculate", 3)],
    ],
)
def test_values_that_are_words_numbers_or_absent(typed: str, option: str, expected: object) -> None:
    given: Any = loading_options(parsed(*typed.split()))
    assert given[option] == expected and type(given[option]) is type(expected)
    assert given["exact"] is False
