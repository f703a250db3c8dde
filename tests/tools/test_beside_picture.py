"""README's picture shows the figures of the table that it is drawn from."""

from __future__ import annotations

import re

import pytest
from beside_picture import runs
from installed import ROOT

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")


def test_the_picture_and_its_words_are_those_of_the_table() -> None:
    picture = (ROOT / "docs/beside.svg").read_text(encoding="utf-8")
    shown = re.findall(r">([^<>]+)</text>", picture)
    chosen = runs(PAGE)
    assert [(run.limit, run.who) for run in chosen] == [
        (limit, who) for limit in ("1 GiB", "1.5 GiB") for who in ("stem-edge", "llama.cpp Q4_0")
    ]
    for run in chosen:
        assert {f"{run.speed:g}", f"{run.anonymous:,}", f"+ {run.mapped:,}"} <= set(shown)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"!\[(.*)\]\(docs/beside.svg\)", readme)
    said = re.findall(r"\d+\.\d+(?! ?GiB)", words.replace("1.5 GiB", ""))
    assert [float(number) for number in said] == [run.speed for run in chosen]


def test_a_page_without_the_table() -> None:
    with pytest.raises(SystemExit, match="no table below"):
        runs("# Models\n")
