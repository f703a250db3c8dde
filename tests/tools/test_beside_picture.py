"""README's picture shows the figures of the table that it is drawn from."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
spec = importlib.util.spec_from_file_location(
    "beside_picture", ROOT / "tools/experiments/beside_picture.py"
)
assert spec is not None and spec.loader is not None
beside_picture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside_picture)


def test_the_picture_and_its_words_are_those_of_the_table() -> None:
    picture = (ROOT / "docs/beside.svg").read_text(encoding="utf-8")
    shown = re.findall(r">([^<>]+)</text>", picture)
    chosen = beside_picture.runs(PAGE)
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
        beside_picture.runs("# Models\n")
