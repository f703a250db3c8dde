"""Options of load on a command line."""

from __future__ import annotations

import argparse

from stem_edge.commands.loading import add_loading, changed_options, loading_options
from stem_edge.runtime.backends.options import LoadOptions


def parsed(*arguments: str) -> argparse.Namespace:
    """Arguments of a command that also has an option with the name of a keyword of load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress", default="an option of the command")
    add_loading(parser)
    return parser.parse_args(arguments)


def test_only_declared_options_are_given_to_load() -> None:
    given = loading_options(parsed("--memory", "1GB", "--provider-library", "mine=/x.so"))
    assert given["memory"] == "1GB" and given["provider_libraries"] == {"mine": "/x.so"}
    assert "progress" not in given


def test_without_arguments_they_are_the_defaults_of_load() -> None:
    args = parsed()
    assert LoadOptions(**loading_options(args)) == LoadOptions()
    assert changed_options(args) == []


def test_changed_options_are_named_as_they_are_typed() -> None:
    args = parsed(
        "--no-overlap", "--provider-library", "a=b", "--no-prefill-graph", "--reads=pread"
    )
    assert sorted(changed_options(args)) == [
        "--no-overlap", "--prefill-graph", "--provider-library",
    ]  # fmt: skip
