"""Options of sampling on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from stem_edge.commands.options.answers import add_sampling, sampling_params
from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.sampling_params import SamplingParams


def parsed(*words: str) -> SamplingParams:
    """Return what a command would generate with."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling(parser.add_argument_group("choosing tokens"))
    return sampling_params(parser.parse_args(words))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema").write_text('{"type": "null"}')
    Path("lark").write_text("start: /é/", encoding="utf-8")
    Path("gbnf").write_text('root ::= "a"')
    Path("bytes").write_bytes(b"\xff")
    Path("empty").touch()


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {}),
        ("--temp 0 --repeat-penalty 2", {"temperature": 0, "repetition_penalty": 2}),
        ("-s 3 --max-tokens 4", {"seed": 3, "max_new_tokens": 4}),
        ("--presence-penalty 0.5 --frequency-penalty -2", {"presence_penalty": 0.5, "frequency_penalty": -2}),
        ("--schema schema", {"grammar": Grammar("json_schema", '{"type":"null"}')}),
        ("--grammar lark", {"grammar": Grammar("lark", "start: /é/")}),
        ("--grammar gbnf", {"grammar": Grammar("gbnf", 'root ::= "a"')}),
        ("--stop a --stop b", {"stop": ["a", "b"]}),
    ],
)  # fmt: skip
def test_options(words: str, fields: Any) -> None:
    assert parsed(*words.split()) == SamplingParams(**{"stop": []} | fields)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--presence-penalty 3", "presence_penalty is 3.0"),
        ("--grammar a --schema schema", "not allowed with"),
        ("--schema lark", "^lark: schema is not JSON .*line 1 column 1"),
        ("--schema none", "none: cannot read"),
        ("--grammar bytes", "bytes: not valid UTF-8 .*; give the grammar as UTF-8"),
        ("--grammar empty", "^empty: grammar is ''"),
    ],
)
def test_refused(words: str, said: str) -> None:
    with pytest.raises((InputError, argparse.ArgumentError), match=said):
        parsed(*words.split())
