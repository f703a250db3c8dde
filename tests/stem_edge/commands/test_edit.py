"""`stem-edge edit` and `generate --edit`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exports import contents
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main

Capture = pytest.CaptureFixture[str]
PROMPT = "The capital of Spain is"
SPAIN = ("--source", "Spain", "--target", "Germany")
MADE = (*SPAIN, "-o", "a.edit")


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo in a folder of its own; the current folder is another one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return Path(shutil.copytree(DEMO, tmp_path / "models" / "demo"))


def run(capsys: Capture, *arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: object) -> str:
    """Run a command that must fail, and return its only line."""
    assert main([str(each) for each in arguments]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("stem-edge: ")


def test_an_edit_is_made_used_and_shown(bundle: Path, capsys: Capture) -> None:
    before = contents(bundle)
    made = run(capsys, "edit", bundle, *SPAIN, "-o", "spain.edit").splitlines()
    assert made[:2] == [
        "Spain -> Germany: scheme auto, scope positions, STEM layers 1,3,5",
        "after a space: ' Spain' looks up ' Germany'",
    ]
    assert "at the start of a text: 'S' looks up ' Germany', 'p' looks up ' Germany'" in made[2]
    assert made[-1].startswith("spain.edit: written; try it: stem-edge generate")
    assert run(capsys, "edit", bundle, "--show", "spain").splitlines() == made[:-1]
    assert run(capsys, "generate", bundle, "-p", PROMPT, "-n", "4").startswith(" Madrid")
    for name in ("spain", "spain.edit", Path("spain").absolute()):
        edited = run(capsys, "generate", bundle, "-p", PROMPT, "-n", "4", "--edit", name)
        assert edited.startswith(" Berlin")
    assert contents(bundle) == before
    assert list(bundle.parent.iterdir()) == [bundle]


@pytest.mark.parametrize(
    ("options", "names", "given"),
    [
        (
            "--layers 1,5 --scheme pad-right --scope everywhere",
            ("New Zealand", "Spain"),
            {"layers": [1, 5], "scheme": "pad-right", "scope": "everywhere"},
        ),
        ("--scheme subset", ("Spain", "New Zealand"), {"scheme": "subset"}),
    ],
)
def test_options_are_those_of_make_edit(
    bundle: Path, capsys: Capture, options: str, names: tuple[str, str], given: dict[str, Any]
) -> None:
    texts = ["--source", names[0], "--target", names[1], "-o", "an.edit"]
    run(capsys, "edit", bundle, *texts, *options.split())
    assert stem_edge.read_edit("an.edit") == stem_edge.make_edit(bundle, *names, **given)


@pytest.mark.parametrize(
    ("source", "target", "options", "said"),
    [
        # After a space both are one token, at the beginning of a text two and three.
        ("France", "Germany", "--scheme swap", "at the start of a text: no fit, so such prompts"),
        ("Spain", "New Zealand", "--scheme average", "the mean of ' New' and ' Zealand'"),
        ("New Zealand", "Spain", "--scope everywhere", "' Zealand' looks up ' Spain'"),
        ("Spain\n\x1b[1m", "Peru", "--scheme average", "Spain\\n\\x1b[1m -> Peru: scheme"),
    ],
)
def test_what_each_token_looks_up_is_shown(
    bundle: Path, capsys: Capture, source: str, target: str, options: str, said: str
) -> None:
    texts = ["--source", source, "--target", target, "-o", "an.edit"]
    run(capsys, "edit", bundle, *texts, *options.split())
    shown = run(capsys, "edit", bundle, "--show", "an.edit")
    assert said in shown
    if "everywhere" in options:
        assert "start of a text" not in shown  # longer there, so unchanged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--source, --target, --out: missing; a new edit needs"),
        (["--source", "Spain", "-o", "a.edit"], "--target: missing"),
        ([*SPAIN], "--out: missing"),
        (["--show", "x", *SPAIN], "--source: for a new edit, not for --show"),
        (["--show", "x", "--force"], "--force: for a new edit, not for --show"),
        (["--show", "x"], "x: cannot read (No such file or directory); make an edit with"),
        ([*MADE, "--layers", "2"], "layers are 2; expected STEM layers of 1,3,5"),
        ([*MADE, "--layers", "1,"], "--layers '1,': not numbers"),
        (["--source", "\udcff", "--target", "x", "-o", "a.edit"], "not valid Unicode"),
    ],
)
def test_contradicting_options_are_one_line(
    bundle: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, "edit", bundle, *arguments)
    assert list(bundle.parent.iterdir()) == [bundle]
    assert list(Path().iterdir()) == []


def test_generate_refuses_other_edits(bundle: Path, tiny_bundle: Path, capsys: Capture) -> None:
    stem_edge.make_edit(tiny_bundle, "a", "b").save("other.edit")
    Path("bad.edit").write_text("{")
    for name, message in (
        ("other", "other.edit: this edit was made for other tables"),
        ("bad", "bad.edit: not an edit"),
        ("gone", "gone: cannot read (No such file"),
    ):
        assert message in refused(capsys, "generate", bundle, "-p", PROMPT, "--edit", name)


def test_an_edit_in_an_evaluation(bundle: Path, capsys: Capture) -> None:
    Path("text.txt").write_text("The capital of Spain is Madrid. The capital of France is Paris.")
    run(capsys, "edit", bundle, *SPAIN, "-o", "here.edit")
    run(capsys, "edit", bundle, *SPAIN, "-o", "a.edit", "--scope", "everywhere")
    command = ["eval", bundle, "--text", "text.txt", "--json"]
    (plain,) = json.loads(run(capsys, *command))
    (found,) = json.loads(run(capsys, *command, "--edit", "a", "--against", bundle))
    assert (plain["edits"], found["edits"]) == (0, 1)
    assert found["divergence"]["reference_perplexity"] == pytest.approx(plain["perplexity"])
    assert found["perplexity"] > 1.5 * plain["perplexity"]
    assert found["divergence"]["greatest"] > 5
    message = refused(capsys, *command, "--edit", "here")
    assert "give edits of scope everywhere" in message


@pytest.mark.slow
def test_without_a_terminal_and_with_arguments_that_are_not_unicode(bundle: Path) -> None:
    command = [sys.executable, "-m", "stem_edge", "edit", str(bundle)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    cases: list[tuple[list[str | bytes], int, bytes]] = [
        ([*SPAIN, "-o", b"\xff.edit"], 0, b"\\udcff.edit: written"),
        (["--show", b"\xff"], 0, b"Spain -> Germany"),
        (["--source", b"\xff", "--target", "x", "-o", "y.edit"], 1, b"not valid Unicode"),
    ]
    for arguments, status, said in cases:
        done = subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            check=False,
        )
        assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr
        assert said in done.stdout + done.stderr
