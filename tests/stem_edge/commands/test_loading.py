"""Options of load on a command line."""

from __future__ import annotations

import argparse

import pytest

from stem_edge.commands.main import main
from stem_edge.commands.options.loading import add_loading, loading_options
from stem_edge.runtime.backends.options import LoadOptions


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


def test_without_arguments_they_are_the_defaults_of_load() -> None:
    args = parsed()
    assert LoadOptions(**loading_options(args)) == LoadOptions()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [([], None), (["--prompt-cache"], True), (["--prompt-cache=DIR"], "DIR")],
)
def test_prompts_are_kept_where_it_is_said(typed: list[str], expected: object) -> None:
    parser = argparse.ArgumentParser()
    add_loading(parser)
    add_loading(parser, "prompt_cache")
    assert loading_options(parser.parse_args(typed))["prompt_cache"] == expected


@pytest.mark.parametrize("command", ["measure"])
def test_commands_that_keep_no_prompts_refuse_to(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "model", "--prompt-cache=DIR"])
    assert "--prompt-cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [([], "auto"), (["auto"], "auto"), (["on"], True), (["off"], False), (["3"], 3)],
)
def test_guessing_is_asked_for_in_words_or_by_number(typed: list[str], expected: object) -> None:
    given = loading_options(parsed(*(["--speculate", *typed] if typed else [])))
    assert given["speculate"] == expected and type(given["speculate"]) is type(expected)
    assert (given["exact"], given["draft"]) == (False, None)


def test_other_words_about_guessing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--speculate", "maybe")
    assert "invalid speculation value: 'maybe'" in capsys.readouterr().err
