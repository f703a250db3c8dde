"""Commands, Python code and links of the documentation work as written."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from api_reference import PAGE, Reference
from hub_server import HubServer
from installed import ROOT, needs_ggml

import stem_edge
from stem_edge.commands.options.loading import LOADING
from stem_edge.export import export_bundle
from stem_edge.export.job.recipe import Recipe
from stem_edge.runtime import SamplingParams, load
from stem_edge.runtime.backends.options import INTERNAL, LoadOptions

README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# Skipped because they install, train for minutes, or need the reader's own files.
NOT_RUN = (
    "CMAKE_ARGS=",
    "make ",
    "pip ",
    "git ",
    "python tools/",
    "pytest ",
    "stem-edge export build/",
    "stem-edge measure build/",
    "stem-edge eval exact",
    "stem-edge inspect stem_edge/",
    "stem-edge serve ",  # until it is ended
)
# Skipped because these providers, clusters and models are not everywhere.
ELSEWHERE = ("--provider cuda", "--provider webgpu", "--ray", "ray start", "hf:org/name", "hf:H")
PYTHON = ROOT / "docs" / "python.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def commands(page: Path) -> list[str]:
    code = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    lines = [line for line in code.splitlines() if line and not line.startswith("#")]
    return [line.split("  #")[0].strip() for line in lines]


@pytest.fixture(scope="module")
def workplace(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader of README has: a checkpoint, a text, and all results so far."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "checkpoint").symlink_to(tiny_checkpoint)
    (folder / "prompt.txt").write_text("Once upon a time")
    run(README, folder)
    return folder


def run(page: Path, folder: Path) -> None:
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    here = [line for line in commands(page) if not any(name in line for name in ELSEWHERE)]
    lines = [line for line in here if not line.startswith(NOT_RUN)]
    for line in [
        *lines,
        *(shlex.join([sys.executable, "-c", one]) for one in blocks(page, "python")),
    ]:
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{page.name}: {line}\n{done.stderr}"


@needs_ggml
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_commands_run_in_their_order_and_then_python(
    page: Path, workplace: Path, hub: HubServer, tiny_checkpoint: Path
) -> None:
    hub.add("org/checkpoint", tiny_checkpoint)
    run(page, workplace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_name_files_that_exist(page: Path) -> None:
    for line in commands(page):
        if line.startswith("python tools/"):
            assert (ROOT / shlex.split(line)[1]).is_file(), line


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rules."""
    code = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_readme_leads_to_every_page_and_is_one_screen() -> None:
    text = README.read_text("utf-8")
    assert all(f"({page.relative_to(ROOT)}" in text for page in PAGES[1:])
    assert len(text.splitlines()) <= 80


def test_options_that_the_command_lacks_are_named() -> None:
    lacking = {f.name for f in fields(LoadOptions)} - INTERNAL - LOADING.keys()
    (sentence,) = re.findall(
        r"the same options as `load`, except (.*?)\(", PYTHON.read_text("utf-8"), re.DOTALL
    )
    assert set(re.findall("`(.*?)`", sentence)) == lacking


@pytest.mark.parametrize(
    ("function", "options"),
    [(load, LoadOptions), (export_bundle, Recipe), (SamplingParams, SamplingParams)],
)
def test_each_option_is_described(function: Callable[..., object], options: type[Any]) -> None:
    own = {field.name for field in fields(options)} - INTERNAL - {"stored", "stored_rows", "aim"}
    said = re.findall(
        r"^(\w+(?:, \w+)*)(?: \([^)]*\))?: ", inspect.getdoc(function) or "", re.MULTILINE
    )
    assert own <= {name for names in said for name in names.split(", ")}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_the_reference_is_current_and_has_each_public_name(reference: Reference) -> None:
    text = PAGE.read_text("utf-8")
    assert reference.page() == text, "write it: python tools/api_reference.py"
    described = set(re.findall(r"^### (\w+)$|^\| `(\w+Error)` ", text, re.MULTILINE))
    assert set(stem_edge.__all__) <= {name for pair in described for name in pair}


def test_the_reference_says_what_each_public_field_is(reference: Reference) -> None:
    fields = {
        f"{one.name}.{name}": text
        for one in reference.classes
        for name, (_, text) in reference.fields(one).items()
    }
    assert len(fields) > 50
    assert [name for name, text in fields.items() if not text] == []
