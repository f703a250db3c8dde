"""Options of load on a command line."""

from __future__ import annotations

import argparse

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
    ("typed", "expected"),
    [([], None), (["--prompt-cache"], True), (["--prompt-cache=DIR"], "DIR")],
)
def test_prompts_are_kept_where_it_is_said(typed: list[str], expected: object) -> None:
    parser = argparse.ArgumentParser()
    add_loading(parser)
    assert loading_options(parser.parse_args(typed))["prompt_cache"] == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [([], "auto"), (["auto"], "auto"), (["on"], True), (["off"], False), (["3"], 3)],
)
def test_guessing_is_asked_for_in_words_or_by_number(typed: list[str], expected: object) -> None:
    given = loading_options(parsed(*(["--speculate", *typed] if typed else [])))
    assert given["speculate"] == expected and type(given["speculate"]) is type(expected)
    assert given["exact"] is False
